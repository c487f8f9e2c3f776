/** Types of ComfyUI's extension API, as far as this pack uses it. The page finds the modules when it loads them. */

interface Window {
  LGraphBadge: import("./comfyui").BadgeClass;
  /** `vueNodesMode` is true while Nodes 2.0 draws the nodes. */
  LiteGraph: { registered_node_types: Readonly<Record<string, unknown>>; vueNodesMode: boolean };
}

declare module "*/scripts/app.js" {
  export const app: import("./comfyui").App;
}

declare module "*/scripts/api.js" {
  export const api: import("./comfyui").Api;
}
