// @ts-check
/** The pack's part of ComfyUI's page. Each module below does one thing; this one connects them to the page. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { addTab } from "./panel/tab.js";
import { foldAdvanced, isPlan, offerDevices } from "./plan/devices.js";
import { showOutcomes } from "./run/outcomes.js";
import { showRefusals } from "./run/refusals.js";

app.registerExtension({
  name: "Parallel",
  setup() {
    showRefusals(app, api);
    showOutcomes(app, api, window.LGraphBadge);
    addTab(app, api);
  },
  nodeCreated(node) {
    if (!isPlan(node)) return;
    offerDevices(node, app.ui.settings.getSettingValue("Comfy.Locale"));
    foldAdvanced(node);
  },
});
