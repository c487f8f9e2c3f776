"""Measures the contrast of the page's texts against their background, as WCAG 2 defines it."""

from __future__ import annotations

CONTRASTS = """within => {
    const pixel = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
        .getContext("2d", {willReadFrequently: true});
    const painted = colours => { // the last one is on top; whatever form a colour is written in
        pixel.fillStyle = "white";
        pixel.fillRect(0, 0, 1, 1);
        for (const colour of colours) {
            pixel.fillStyle = colour;
            pixel.fillRect(0, 0, 1, 1);
        }
        return [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const behind = element => {
        const colours = [];
        for (let each = element; each; each = each.parentElement) colours.unshift(getComputedStyle(each).backgroundColor);
        return colours;
    };
    const luminance = rgb => rgb.map(value => value / 255)
        .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
    const contrast = (colour, below) => {
        const [dark, light] = [painted([...below, colour]), painted(below)].map(luminance).sort((a, b) => a - b);
        return (light + 0.05) / (dark + 0.05);
    };
    const found = [];
    for (const element of [within, ...within.querySelectorAll("*")]) {
        const says = [...element.childNodes].some(child => child.nodeType === 3 && child.textContent.trim());
        if (says && element.checkVisibility() && !element.closest(":disabled"))
            found.push([element.textContent.trim(), contrast(getComputedStyle(element).color, behind(element))]);
        if (element.matches(".pp-row path"))
            found.push([
                element.getAttribute("class"),
                contrast(getComputedStyle(element).fill, behind(element.parentElement)),
            ]);
    }
    return found;
}"""
"""JavaScript function that returns the contrast of each text in an element, and of each part of the timeline (by class)."""

LEGIBLE, VISIBLE = 4.5, 1.8
"""Smallest allowed contrast of a text, and of a part of a drawing."""
