// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { decide, goesBack, isAnothers, linkInTheWay, read, usesIn } from "../../web/swap/found.js";
import { nextOf, outcomeOf } from "../../web/swap/said.js";
import { beforeOf, onAll, onOne } from "../../web/swap/swapped.js";
import { Words } from "../../web/words.js";
import { ENGLISH, LANGUAGES } from "./languages.js";

/** @import { Graph, GraphNode } from "../../web/comfyui" */
/** @import { Workflow } from "../../web/swap/graph" */

/** Returns a workflow with a VAE loader, and a model loader in a subgraph that gets its file from outside. */
/** @returns {Workflow} */
const workflow = () => ({
  nodes: [
    {
      id: 3,
      type: "VAELoader",
      size: [270, 58],
      inputs: [{ name: "vae_name", type: "COMBO", link: null }],
      outputs: [{ name: "VAE", type: "VAE", links: [] }],
      properties: { cnr_id: "comfy-core", ver: "0.3.40", "Node name for S&R": "VAELoader", models: [] },
      widgets_values: ["ae.safetensors"],
    },
    { id: 7, type: "sub", size: [300, 200], properties: { proxyWidgets: [["46", "unet_name"]] } },
  ],
  links: [[1, 7, 0, 9, 0, "IMAGE"]],
  definitions: {
    subgraphs: [
      {
        id: "sub",
        nodes: [
          {
            id: 46,
            type: "UNETLoader",
            size: [270, 82],
            inputs: [
              { name: "unet_name", type: "COMBO", link: 385 },
              { name: "weight_dtype", type: "COMBO", link: null },
            ],
            outputs: [{ name: "MODEL", type: "MODEL", links: [61] }],
            properties: { cnr_id: "comfy-core", "Node name for S&R": "UNETLoader" },
            widgets_values: ["flux1-dev.safetensors", "fp8_e4m3fn"],
          },
        ],
        links: [
          { id: 385, target_id: 46, target_slot: 0 },
          { id: 61, target_id: 50, target_slot: 0 },
        ],
        inputs: [{ linkIds: [385] }],
      },
    ],
  },
});

/** @type {(file: string) => import("../../web/swap/swapped").Loaded} */
const loaded = (file) => ({ files: file ? [file] : [], least: [233, 106] });

const BOTH = new Map([
  ["/3", loaded("ae.safetensors")],
  ["sub/46", loaded("flux1-dev.safetensors")],
]);

/** @type {(workflow: Workflow) => any} */
const inner = ({ definitions }) => definitions?.subgraphs?.[0];

test("a loader in a subgraph keeps its file, dtype and links, whose slots come after the plan's", () => {
  const swapped = onAll(workflow(), new Set(BOTH.keys()));
  const [loader] = inner(swapped).nodes;
  assert.equal(loader.type, "LoadParallelDiffusionModel");
  assert.deepEqual(loader.widgets_values, ["flux1-dev.safetensors", "fp8_e4m3fn"]);
  assert.deepEqual(
    loader.inputs.map((/** @type {{ name: string }} */ { name }) => name),
    ["plan", "unet_name", "weight_dtype"],
  );
  assert.deepEqual(inner(swapped).links[0], { id: 385, target_id: 46, target_slot: 1 });
  assert.deepEqual(inner(swapped).links[1], { id: 61, target_id: 50, target_slot: 0 });
  assert.equal("cnr_id" in loader.properties, false, "it comes from another pack now");
});

test("swapping back restores the workflow bit for bit, and the input stays unchanged", () => {
  const before = workflow();
  assert.deepEqual(onOne(onAll(before, new Set(BOTH.keys())), BOTH), before);
  assert.deepEqual(before, workflow(), "the given one stays");
  assert.deepEqual(onAll(before, new Set()), before);
});

test("only the named loaders change; an enlarged one gets its old size back, and one that the user widened keeps its size", () => {
  const swapped = onAll(workflow(), new Set(["/3"]));
  const [loader] = swapped.nodes;
  assert.ok(loader);
  assert.equal(loader.type, "LoadParallelVAE");
  assert.equal(inner(swapped).nodes[0].type, "UNETLoader");
  loader.size = [270, 106];
  assert.deepEqual(onOne(swapped, BOTH).nodes[0]?.size, [270, 58]);
  loader.size = [400, 106];
  assert.deepEqual(onOne(swapped, BOTH).nodes[0]?.size, [400, 106]);
});

test("a plan that was connected meanwhile is removed with its link", () => {
  const swapped = onAll(workflow(), new Set(["/3"]));
  const [loader] = swapped.nodes;
  const plan = loader?.inputs?.find(({ name }) => name === "plan");
  if (plan) plan.link = 9;
  swapped.nodes.push({
    ...{ id: 11, type: "ParallelPlan", size: [300, 100], properties: {} },
    outputs: [{ name: "plan", type: "PARALLEL_PLAN", links: [9] }],
  });
  swapped.links.push([9, 11, 0, 3, 0, "PARALLEL_PLAN"]);
  const back = onOne(swapped, BOTH);
  assert.deepEqual(back.links, workflow().links);
  assert.deepEqual(back.nodes[2]?.outputs?.[0]?.links, []);
  assert.deepEqual(back.nodes[0], workflow().nodes[0]);
});

test("loaders that were always this pack's change to the stock loaders, and their sampler to the stock sampler", () => {
  /** @type {Workflow} */
  const ours = {
    nodes: [
      {
        ...{ id: 1, type: "LoadParallelFlux", size: [300, 82], properties: { cnr_id: "us" } },
        inputs: [{ name: "plan", type: "PARALLEL_PLAN", link: null }],
        widgets_values: ["flux1-dev.safetensors", "default"],
      },
      {
        ...{ id: 2, type: "ParallelSampler", size: [300, 300], properties: {} },
        widgets_values: [1, "fixed", 4, 1, "a", "b", 1],
      },
    ],
    links: [],
  };
  const files = { "/1": loaded("flux1-dev.safetensors"), "/2": loaded("") };
  const [model, sampler] = onOne(ours, new Map(Object.entries(files))).nodes;
  assert.deepEqual([model?.type, model?.widgets_values?.length, model?.inputs], ["UNETLoader", 2, []]);
  assert.deepEqual([sampler?.type, sampler?.widgets_values?.length], ["KSampler", 7]);
});

/** @type {(id: number, type: string, more?: Partial<GraphNode>) => GraphNode} */
const node = (id, type, more = {}) => ({
  ...{ id, type, title: type, graph: null, badges: [], properties: {} },
  size: [200, 100],
  computeSize: () => [200, 100],
  setSize() {},
  setDirtyCanvas() {},
  ...more,
});

/** @type {(nodes: GraphNode[], id?: string) => Graph} */
const graph = (nodes, id) => ({
  nodes,
  ...(id === undefined ? {} : { id }),
  getNodeById: () => undefined,
  trigger() {},
});

const loader = node(46, "UNETLoader", { title: "Load Diffusion Model" });
const twice = graph([loader], "sub");
const root = graph([node(7, "sub", { subgraph: twice }), node(8, "sub", { subgraph: twice }), node(3, "VAELoader")]);

test("a loader in a subgraph that is used twice is found twice, with one place", () => {
  const found = [...usesIn(root)].map(({ id, place }) => `${id} at ${place}`);
  assert.deepEqual(found, ["7 at /7", "7:46 at sub/46", "8 at /8", "8:46 at sub/46", "3 at /3"]);
});

/** @type {(file: unknown) => { class_type: string, inputs: Record<string, unknown> }} */
const queued = (file) => ({ class_type: "", inputs: { unet_name: file, vae_name: file } });
const uses = [...usesIn(root)].filter(({ node: { subgraph } }) => !subgraph);

const here = () => true;

test("a loader that is not installed stays", () => {
  const prompt = { "7:46": queued("a"), "8:46": queued("a"), 3: queued("b") };
  const gone = read(uses, prompt, (type) => type !== "UNETLoader");
  const { places, left } = decide(gone, () => ({ swap: true }));
  assert.deepEqual([...places.keys()], ["/3"]);
  const whys = Object.fromEntries(left.map(({ use, why }) => [use.id, why]));
  assert.deepEqual(whys, { "7:46": { key: "swap.missing" }, "8:46": { key: "swap.missing" } });
});

test("a loader changes if all of its uses can change, except muted and bypassed ones", () => {
  /** @type {(seven: unknown, eight?: unknown) => string[]} */
  const places = (seven, eight) => {
    const prompt = { "7:46": queued(seven), 3: queued("ae.safetensors"), ...(eight ? { "8:46": queued(eight) } : {}) };
    const stays = { swap: false, why: { said: "unknown." } };
    const { places } = decide(read(uses, prompt, here), ({ files }) => (files[0] === "bad" ? stays : { swap: true }));
    return [...places.keys()];
  };
  assert.deepEqual(places("good", "good"), ["sub/46", "/3"]);
  assert.deepEqual(places("good"), ["sub/46", "/3"], "the other one is bypassed");
  assert.deepEqual(places("good", "bad"), ["/3"]);
  assert.deepEqual(places(["5", 0], "good"), ["/3"], "a file that comes over a link is not known");
});

test("the message names each loader that changed and each that stays once, with its reason", () => {
  const decision = decide(read(uses, { "7:46": queued("a"), "8:46": queued("a") }, here), () => ({ swap: true }));
  const changed = uses.filter(({ place }) => decision.places.has(place));
  const message = outcomeOf("all", changed, decision, ENGLISH);
  assert.equal(message.summary, "1 model on all GPUs");
  assert.deepEqual(message.detail.split("\n"), [
    "Load Diffusion Model is in a subgraph that is used 2 times, and changes in each.",
    "VAELoader was not swapped: it is muted or bypassed.",
    "Ctrl+Z undoes it.",
  ]);
  const nothing = { changed: [], left: [], silent: 0 };
  assert.equal(outcomeOf("all", [], nothing, ENGLISH).summary, "No loader here can change to all GPUs.");
  const silent = { ...nothing, silent: 1 };
  assert.match(outcomeOf("all", [], silent, ENGLISH).detail, /^A text encoder changes only if it is larger/);
  const reason = "VAELoader was not swapped: it is muted or bypassed.";
  assert.equal(outcomeOf("all", [], { ...silent, left: decision.left }, ENGLISH).detail, reason, "the only reason");
});

test("a loader of another pack is distinguished from nodes that are no loaders", () => {
  /** @type {(inputs: string[], outputs: string[], type?: string) => boolean} */
  const is = (inputs, outputs, type = "SomeLoader") => {
    const [taken, given] = [inputs, outputs].map((types) => types.map((each) => ({ type: each })));
    return isAnothers(node(1, type, { inputs: taken, outputs: given }));
  };
  assert.equal(is(["COMBO"], ["MODEL"]), true);
  assert.equal(is(["MODEL", "COMBO"], ["MODEL"]), false);
  assert.equal(is([], ["IMAGE"]), false);
  assert.equal(is(["COMBO"], ["MODEL"], "LoadParallelCogVideoX"), false);
});

test("a loader without a stock counterpart stays", () => {
  const back = goesBack((type) => type !== "UnetLoaderGGUF");
  const use = { place: "/1", id: "1", node: node(1, "LoadParallelDiffusionModel") };
  assert.equal(back({ use, files: ["a.safetensors"] }).swap, true);
  for (const file of ["a.gguf", "checkpoints/a.safetensors", "a folder"]) {
    assert.equal(back({ use, files: [file] }).swap, false, file);
  }
});

/** @type {(type: string, names: string[], values: unknown[]) => import("../../web/swap/graph").SavedNode} */
const encoder = (type, names, values) => ({
  ...{ id: 5, type, size: [270, 130], properties: { "Node name for S&R": type }, widgets_values: values },
  inputs: names.map((name, at) => ({ name, type: "COMBO", widget: { name }, link: 20 + at })),
});

/** @type {(node: import("../../web/swap/graph").SavedNode) => Workflow} */
const around = (node) => ({
  nodes: [node],
  links: (node.inputs ?? []).map(({ link }, at) => [link ?? 0, 9, 0, node.id, at, "COMBO"]),
});

const DUAL = () =>
  encoder("DualCLIPLoader", ["clip_name1", "clip_name2", "type"], ["l.st", "t5.st", "flux", "default"]);
const SINGLE = () => encoder("CLIPLoader", ["clip_name", "type"], ["t5.st", "wan", "default"]);

/** @type {(...files: string[]) => Map<string, import("../../web/swap/swapped").Loaded>} */
const five = (...files) => new Map([["/5", { files, least: [0, 0] }]]);

test("the loader of two text encoders keeps values and links under the fields' new names", () => {
  const { nodes, links } = onAll(around(DUAL()), new Set(["/5"]));
  assert.equal(nodes[0]?.type, "LoadParallelCLIP");
  assert.deepEqual(nodes[0]?.widgets_values, ["l.st", "flux", "t5.st"]);
  const slots = (nodes[0]?.inputs ?? []).map(({ name, widget, link }) => `${name} ${widget?.name} ${link}`);
  const fields = ["clip_name clip_name 20", "type type 22", "clip_name2 clip_name2 21"];
  assert.deepEqual(slots, ["plan undefined null", ...fields]);
  const ends = links.map((link) => Array.isArray(link) && `${link[0]} to slot ${link[4]}`);
  assert.deepEqual(ends, ["20 to slot 1", "21 to slot 3", "22 to slot 2"]);
});

/** @type {() => import("../../web/swap/graph").SavedNode[]} */
const WITHOUT_TYPE = () => [
  encoder("LTXAVTextEncoderLoader", ["text_encoder", "ckpt_name"], ["g.st", "ltx.st", "default"]),
  encoder("TripleCLIPLoader", ["clip_name1", "clip_name2", "clip_name3"], ["l.st", "g.st", "t5.st"]),
  encoder("QuadrupleCLIPLoader", ["clip_name1", "clip_name4"], ["l.st", "g.st", "t5.st", "llama.st"]),
];

test("a loader without a type is swapped with the type that it loads, and goes back as it was", () => {
  const swapped = WITHOUT_TYPE().map((node) => onAll(around(node), new Set(["/5"])).nodes[0]);
  assert.ok(swapped.every((node) => node?.type === "LoadParallelCLIP"));
  const values = ["g.st ltxv ltx.st", "l.st sd3 g.st t5.st", "l.st hidream g.st t5.st llama.st"];
  assert.deepEqual(
    swapped.map((node) => node?.widgets_values?.join(" ")),
    values,
  );
  for (const node of WITHOUT_TYPE()) {
    const files = (node.widgets_values ?? []).map(String).filter((value) => value !== "default");
    const loaded = new Map([["/5", { files, least: /** @type {[number, number]} */ ([0, 0]), encoder: typeOf(node) }]]);
    assert.deepEqual(onOne(onAll(around(node), new Set(["/5"])), loaded), around(node));
    const inputs = { text_encoder: "g.st", ckpt_name: "ltx.st", clip_name1: "l.st", clip_name2: "g.st" };
    const prompt = { 5: { class_type: node.type, inputs: { ...inputs, clip_name3: "t5.st", clip_name4: "llama.st" } } };
    const [found] = read([{ place: "/5", id: "5", node: /** @type {GraphNode} */ (node) }], prompt, here);
    assert.deepEqual([found?.files, found?.type], [files, typeOf(node)]);
  }
});

/** @type {(node: { type: string }) => string} */
const typeOf = ({ type }) =>
  ({ LTXAVTextEncoderLoader: "ltxv", TripleCLIPLoader: "sd3", QuadrupleCLIPLoader: "hidream" })[type] ?? "";

test("an app shows a swapped loader's fields under their new names, and back", () => {
  /** @type {(name: string) => [string | number, string, object?][]} */
  const inputs = (name) => [
    ["5", name],
    ["root:5:clip_name2", "clip_name2", { height: 3 }],
    [`root:5:${name}`, name, { height: 3 }],
    [6, "clip_name1"],
  ];
  const before = { ...around(DUAL()), extra: { linearData: { inputs: inputs("clip_name1") } } };
  const swapped = onAll(before, new Set(["/5"]));
  assert.deepEqual(swapped.extra?.linearData?.inputs, inputs("clip_name"));
  assert.deepEqual(onOne(swapped, five("l.st", "t5.st")), before);
});

test("an app shows the fields of a swapped loader in a subgraph under their new names, and those of another node as they were", () => {
  const inner = around(DUAL());
  /** @type {(nodes: import("../../web/swap/graph").SavedNode[]) => unknown} */
  const shown = (nodes) => {
    const extra = {
      linearData: { inputs: ["5", "9:5", "7:5:6"].map((id) => /** @type {const} */ ([id, "clip_name1"])) },
    };
    const whole = /** @type {Workflow} */ (/** @type {unknown} */ ({ nodes, links: [], extra }));
    whole.definitions = { subgraphs: [{ ...inner, id: "sub" }] };
    return onAll(whole, new Set(["sub/5"])).extra?.linearData?.inputs?.map(([, name]) => name);
  };
  assert.deepEqual(shown([]), ["clip_name", "clip_name", "clip_name1"]);
  assert.deepEqual(shown([SINGLE()]), ["clip_name1", "clip_name", "clip_name1"], "the outer node 5 is another");
});

test("the loader of text encoders that goes back is as it was, with the device that the other node has no field for", () => {
  for (const node of [DUAL(), SINGLE()]) {
    node.widgets_values?.splice(-1, 1, "cpu");
    const before = around(node);
    const files = node.type === "CLIPLoader" ? ["t5.st"] : ["l.st", "t5.st"];
    assert.deepEqual(onOne(onAll(before, new Set(["/5"])), five(...files)), before);
  }
});

test("the slot of the device disappears, and comes back with the page", () => {
  const node = SINGLE();
  node.inputs?.push({ name: "device", type: "COMBO", widget: { name: "device" }, link: null });
  const names = onAll(around(node), new Set(["/5"])).nodes[0]?.inputs?.map(({ name }) => name);
  assert.deepEqual(names, ["plan", "clip_name", "type"]);
});

test("a parallel loader of text encoders goes back by its number of files, also if that has changed", () => {
  /** @type {(node: import("../../web/swap/graph").SavedNode, ...files: string[]) => [string, unknown[]]} */
  const back = (node, ...files) => {
    const [found] = onOne(around(node), five(...files)).nodes;
    return [found?.type ?? "", found?.widgets_values ?? []];
  };
  /** @type {(...values: unknown[]) => import("../../web/swap/graph").SavedNode} */
  const ours = (...values) => encoder("LoadParallelCLIP", ["plan", "clip_name", "type", "clip_name2"], values);
  assert.deepEqual(back(ours("t5.st", "wan", "none", "none", "none"), "t5.st"), ["CLIPLoader", ["t5.st", "wan"]]);
  const two = ours("l.st", "flux", "t5.st", "none", "none");
  assert.deepEqual(back(two, "l.st", "t5.st"), ["DualCLIPLoader", ["l.st", "t5.st", "flux"]]);
  const [swapped = two] = onAll(around(SINGLE()), new Set(["/5"])).nodes;
  swapped.widgets_values = ["t5.st", "flux", "l.st", "none", "none"];
  assert.deepEqual(back(swapped, "t5.st", "l.st"), ["DualCLIPLoader", ["t5.st", "l.st", "flux"]]);
  const use = { place: "/5", id: "5", node: node(5, "LoadParallelCLIP") };
  const goes = (/** @type {string} */ files) => goesBack(here)({ use, files: files.split(" ") }).swap;
  for (const files of ["a.st", "a.st b.st", "a.st b.st c.st", "a.st b.st c.st d.st"]) assert.equal(goes(files), true);
  for (const files of ["a.st none c.st", "a.st checkpoints/b.st"]) assert.equal(goes(files), false);
});

test("a text encoder of LTX goes back to its own loader, until its type is changed", () => {
  const [ltx] = WITHOUT_TYPE();
  assert.ok(ltx);
  const [swapped] = onAll(around(ltx), new Set(["/5"])).nodes;
  const [hand] = around(encoder("LoadParallelCLIP", ["plan", "clip_name"], ["g.st", "ltxv", "ltx.st"])).nodes;
  assert.ok(swapped && hand);
  const files = ["g.st", "ltx.st"];
  for (const node of [swapped, hand]) {
    assert.equal(beforeOf(node, { files, encoder: "ltxv" })?.type, "LTXAVTextEncoderLoader");
    assert.equal(beforeOf(node, { files, encoder: "flux" })?.type, "DualCLIPLoader");
  }
});

test("a text encoder's loader stays without a word on the CPU and where it is off, and names a link in the way", () => {
  /** @type {(inputs: Record<string, unknown> | undefined) => unknown} */
  const found = (inputs) => {
    /** @type {import("../../web/comfyui").Prompt} */
    const prompt = inputs ? { 5: { class_type: "CLIPLoader", inputs } } : {};
    const [{ use: _, ...rest } = {}] = read([{ place: "/5", id: "5", node: node(5, "CLIPLoader") }], prompt, here);
    return rest;
  };
  const inputs = { clip_name: "t5.st", type: "wan", device: "default" };
  assert.deepEqual(found(inputs), { files: ["t5.st"], type: "wan" });
  assert.deepEqual(found({ ...inputs, device: "cpu" }), {});
  assert.deepEqual(found(undefined), {});
  assert.deepEqual(found({ ...inputs, clip_name: ["7", 0] }), { why: { key: "swap.linked" } });
  const why = (/** @type {string} */ field) => ({ key: "swap.linked.field", values: { field } });
  assert.deepEqual(found({ ...inputs, type: ["7", 0] }), { why: why("type") });
  const slots = ["clip_name", "device"].map((name) => ({ name, type: "COMBO", link: 3 }));
  assert.deepEqual(linkInTheWay(node(5, "CLIPLoader", { inputs: slots })), why("device"));
  assert.equal(linkInTheWay(node(5, "CLIPLoader", { inputs: slots.slice(0, 1) })), undefined);
});

test("the message says why a text encoder was swapped, and nothing of one that stays without a reason", () => {
  const use = { place: "/5", id: "5", node: node(5, "CLIPLoader", { title: "Load CLIP" }) };
  const prompt = { 5: { class_type: "CLIPLoader", inputs: { clip_name: "t5.st", type: "wan" } } };
  const said = "t5.st needs 52.35 GB on one GPU (51.50 GB of weights), and no GPU has more than 23.40 GB free.";
  const large = decide(read([use], prompt, here), () => ({ swap: true, why: { said } }));
  const message = outcomeOf("all", [use], large, ENGLISH);
  assert.equal(message.summary, "1 text encoder on all GPUs");
  assert.deepEqual(message.detail.split("\n"), [`Load CLIP was swapped: ${said}`, "Ctrl+Z undoes it."]);
  assert.equal(message.life, undefined, "it stays until it is read");
  const chinese = new Words(LANGUAGES, () => "zh");
  assert.match(outcomeOf("all", [use], large, chinese).detail, /t5.st 在单个 GPU 上需要 52.35 GB（权重 51.50 GB）/);
  const small = decide(read([use], prompt, here), () => ({ swap: false }));
  assert.equal(small.places.size, 0);
  const model = { place: "/6", id: "6", node: node(6, "UNETLoader") };
  const vae = { place: "/7", id: "7", node: node(7, "VAELoader") };
  assert.equal(outcomeOf("all", [model], small, ENGLISH).detail, "Ctrl+Z undoes it.");
  assert.match(outcomeOf("all", [], small, ENGLISH).detail, /^A text encoder changes only if /);
  const all = outcomeOf("all", [model, use, vae], large, ENGLISH);
  assert.equal(all.summary, "1 model, 1 text encoder and 1 VAE on all GPUs");
});

test("the message after a swap has the expected gain and the next step, or what is in the way", () => {
  /** @type {(brief: string, refusal?: string) => import("../../web/run/expectations").Answer} */
  const answer = (brief, refusal = "") => ({ said: refusal, sign: "", brief, refused: refusal !== "" });
  const [two, less] = [answer("2 GPUs: about 2.0x"), answer("2 GPUs: 1.5x to 1.8x")];
  assert.equal(nextOf([two, two], ENGLISH).line, "2 GPUs: about 2.0x. Press Run.");
  assert.equal(nextOf([two, less], ENGLISH).line, "2 GPUs: about 2.0x; 2 GPUs: 1.5x to 1.8x. Press Run.");
  assert.equal(nextOf([answer("")], ENGLISH).line, "Press Run.");
  assert.equal(nextOf([], ENGLISH).line, "Press Run.");
  const refused = nextOf([two, answer("", "Not enough GPU memory.")], ENGLISH);
  assert.deepEqual(refused, { line: "Not enough GPU memory.", refused: true });
  assert.equal(nextOf(undefined, ENGLISH).line, "No GPU found: the workers use the CPU. Press Run.");
  assert.equal(nextOf([two], new Words(LANGUAGES, () => "zh")).line, "2 个 GPU：约 2.0 倍。请按“运行”。");
});
