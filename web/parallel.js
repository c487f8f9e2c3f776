// @ts-check
/** The pack's part of ComfyUI's page. This module connects the other modules, which do one thing each, to the page. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { greet } from "./messages.js";
import { addTab } from "./panel/tab.js";
import { countGpus, foldAdvanced, isFolded, isPlan, offerDevices, orderFields } from "./plan/devices.js";
import { fillIn, isLoader, keepWithWorkflow } from "./plan/unplanned.js";
import { Expectations } from "./run/expectations.js";
import { showOutcomes } from "./run/outcomes.js";
import { showRefusals } from "./run/refusals.js";
import { Signs } from "./run/signs.js";
import { showStrip } from "./run/strip.js";
import { showTexts } from "./run/texts.js";
import { rank } from "./search.js";
import { settings, unplanned } from "./settings.js";
import { offerSprites } from "./sprites.js";
import { commands, KEYS, menuOf } from "./swap/offered.js";
import { Swap } from "./swap/swap.js";
import { describeTemplates } from "./templates.js";
import { Words } from "./words.js";

const words = Words.of(app);
let drawTab = () => {}; // replaced once there is a tab
/** @type {Expectations | undefined} */
let expectations;
const swap = new Swap(
  app,
  api,
  words,
  (type) => type in window.LiteGraph.registered_node_types,
  async () =>
    countGpus() || unplanned(app).devices.startsWith("tcp:") ? ((await expectations?.now()) ?? []) : undefined,
);

app.registerExtension({
  name: "Parallel",
  commands: commands(swap),
  keybindings: KEYS,
  settings: settings(() => {
    setTimeout(() => drawTab()); // the page calls this before it stores the value
    expectations?.look();
  }),
  async init() {
    await words.load(api); // before any node is created
    describeTemplates(api, words);
  },
  setup() {
    const signs = new Signs(window.LGraphBadge, () => window.LiteGraph.vueNodesMode);
    app.canvas.canvas.addEventListener("litegraph:set-graph", signs.redraw);
    app.ui.settings.addEventListener("Comfy.VueNodes.Enabled.change", signs.redraw);
    showTexts(app, api, signs, words);
    showRefusals(app, api, words);
    showOutcomes(app, api, signs, words);
    showStrip(app, api, words);
    keepWithWorkflow(app);
    expectations = new Expectations(app, api, signs, words, () => drawTab());
    drawTab = addTab(app, api, words, swap, () => expectations?.latest ?? []);
    void greet(app, api, words, countGpus()).catch(console.error);
  },
  afterConfigureGraph() {
    drawTab();
    expectations?.look();
    void offerSprites(app, api, words); // not awaited, so that the graph opens while the user is asked
  },
  beforeRegisterVueAppNodeDefs: rank,
  getNodeMenuItems: (node) => menuOf(swap, node, words),
  nodeCreated(node) {
    if (isPlan(node)) {
      offerDevices(node, words);
      orderFields(node);
    }
    if (isLoader(node)) fillIn(app, node);
    if (isFolded(node)) foldAdvanced(node);
  },
});
