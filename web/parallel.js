// @ts-check
/** The pack's part of ComfyUI's page. Each module below does one thing; this one connects them to the page. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { addTab } from "./panel/tab.js";
import { foldAdvanced, isFolded, isPlan, offerDevices } from "./plan/devices.js";
import { showOutcomes } from "./run/outcomes.js";
import { showRefusals } from "./run/refusals.js";
import { Signs } from "./run/signs.js";
import { showTexts } from "./run/texts.js";
import { SETTINGS } from "./settings.js";
import { offerSprites } from "./sprites.js";
import { commands, KEYS, menuOf } from "./swap/offered.js";
import { Swap } from "./swap/swap.js";
import { Words } from "./words.js";

const words = Words.of(app);
const swap = new Swap(app, api, words, (type) => type in window.LiteGraph.registered_node_types);
let workflowOpened = () => {}; // until there is a tab

app.registerExtension({
  name: "Parallel",
  commands: commands(swap),
  keybindings: KEYS,
  settings: SETTINGS,
  async init() {
    await words.load(api); // before any node is made
  },
  setup() {
    const signs = new Signs(window.LGraphBadge);
    showTexts(app, api, signs, words);
    showRefusals(app, api, words);
    showOutcomes(app, api, signs, words);
    workflowOpened = addTab(app, api, words, swap);
  },
  afterConfigureGraph() {
    workflowOpened();
    void offerSprites(app, api, words); // the graph is open while it asks
  },
  getNodeMenuItems: (node) => menuOf(swap, node, words),
  nodeCreated(node) {
    if (isPlan(node)) offerDevices(node, words);
    if (isFolded(node)) foldAdvanced(node);
  },
});
