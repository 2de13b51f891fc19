/** The page: loads the bundle beside it, and decodes the word in its field whenever that changes. */

import * as ort from "./node_modules/onnxruntime-web/dist/ort.wasm.bundle.min.mjs";

import { Generator, TextError, Vocabulary, graphName } from "./generator.mjs";

const BUNDLE = "tfm_bundle";
const VARIANT = "fp32";
const SOUNDS = {
  AA: "ɑ", AE: "æ", AH: "ʌ", AO: "ɔ", AW: "aʊ", AY: "aɪ", B: "b", CH: "tʃ", D: "d", DH: "ð", EH: "ɛ", ER: "ɝ", EY: "eɪ",
  F: "f", G: "ɡ", HH: "h", IH: "ɪ", IY: "i", JH: "dʒ", K: "k", L: "l", M: "m", N: "n", NG: "ŋ", OW: "oʊ", OY: "ɔɪ",
  P: "p", R: "ɹ", S: "s", SH: "ʃ", T: "t", TH: "θ", UH: "ʊ", UW: "u", V: "v", W: "w", Y: "j", Z: "z", ZH: "ʒ",
};

const element = (id) => document.getElementById(id);
const word = element("word");

/** A file of the bundle. */
async function open(name) {
  const response = await fetch(`${BUNDLE}/${name}`);
  if (!response.ok) {
    throw new Error(`${BUNDLE}/${name} cannot be read (${response.status}): export the bundle into this folder`);
  }
  return response;
}

/** The bytes of a file of the bundle; shows how many have come. */
async function download(name, size) {
  const bytes = new Uint8Array(size);
  const progress = element("progress");
  progress.max = size;
  let length = 0;
  for (const reader = (await open(name)).body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) return bytes;
    bytes.set(value, length);
    length += value.length;
    progress.value = length;
  }
}

async function load() {
  const manifest = await (await open("bundle.json")).json();
  const vocabulary = new Vocabulary(await (await open("tokenizer/tokenizer.json")).json(), manifest.special_ids);
  const name = graphName(manifest, VARIANT);
  const graph = await download(name, manifest.files[name].bytes);
  ort.env.wasm.numThreads = 1; // more need a server that isolates the page (COOP and COEP)
  // A model of more than 100 MB keeps its weights beside generate.onnx. For one of those, add to the options:
  // externalData: [{ path: "weights.bin", data: `${BUNDLE}/onnx/${VARIANT}/weights.bin` }]
  const session = await ort.InferenceSession.create(graph, { executionProviders: ["wasm"] });
  return new Generator(ort, session, manifest, vocabulary);
}

/** Show an answer's tokens, with a sentence on it for those who do not see them, or what is wrong with the word. */
function show({ tokens = [], summary = "", problem = "" }) {
  const items = tokens.map((phone) => {
    const item = document.createElement("li");
    for (const [name, text] of [["phone", phone], ["sound", SOUNDS[phone] ?? ""]]) {
      const part = document.createElement("span");
      part.className = name;
      part.textContent = text;
      item.append(part);
    }
    return item;
  });
  element("phones").replaceChildren(...items);
  element("summary").textContent = summary;
  element("problem").textContent = problem;
  word.setAttribute("aria-invalid", String(problem !== ""));
}

/** What the model makes of a text, for `show`. */
async function decode(generator, text) {
  if (text.trim() === "") return {};
  try {
    const begin = performance.now();
    const [answer] = await generator.generate([text]);
    const facts = [`probability ${Math.exp(answer.score).toFixed(2)}`, `${Math.ceil(performance.now() - begin)} ms`];
    return { tokens: answer.tokens, summary: [answer.text, ...facts].join(" · ") };
  } catch (problem) {
    if (!(problem instanceof TextError)) throw problem;
    return { problem: `This word cannot be read: ${problem.message}.` };
  }
}

async function main() {
  const generator = await load();
  element("loading").hidden = true;
  word.disabled = false;
  word.focus();
  let shown = "";
  let busy = false;
  const update = async () => {
    if (busy) return; // the loop below will see what is in the field now
    busy = true;
    try {
      while (shown !== word.value) {
        shown = word.value;
        show(await decode(generator, shown));
      }
    } finally {
      busy = false;
    }
  };
  word.addEventListener("input", () => update().catch(fail));
  word.form.addEventListener("submit", (event) => event.preventDefault());
}

function fail(problem) {
  element("loading").hidden = true;
  show({ problem: `${problem.message}.` });
  console.error(problem);
}

main().catch(fail);
