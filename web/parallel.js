// @ts-check
/** The pack's part of ComfyUI's page. Each module below does one thing; this one connects them to the page. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { addTab } from "./panel/tab.js";
import { foldAdvanced, isPlan, offerDevices } from "./plan/devices.js";
import { showOutcomes } from "./run/outcomes.js";
import { showRefusals } from "./run/refusals.js";
import { showTexts } from "./run/texts.js";
import { offerSprites } from "./sprites.js";
import { Words } from "./words.js";

const words = Words.of(app);

app.registerExtension({
  name: "Parallel",
  async init() {
    await words.load(api); // before any node is made
  },
  setup() {
    showTexts(app, api, words);
    showRefusals(app, api, words);
    showOutcomes(app, api, window.LGraphBadge, words);
    addTab(app, api, words);
  },
  afterConfigureGraph() {
    void offerSprites(app, api, words); // the graph is open while it asks
  },
  nodeCreated(node) {
    if (!isPlan(node)) return;
    offerDevices(node, words);
    foldAdvanced(node);
  },
});
