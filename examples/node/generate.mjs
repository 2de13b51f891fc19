/** Decode texts with a bundle in Node: one call of its generate.onnx for many of them, and no Python. */

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { parseArgs } from "node:util";

import * as ort from "onnxruntime-node";

import { Generator, TextError, Vocabulary, graphName } from "../web/generator.mjs";

const USAGE = `Usage: node generate.mjs [--variant fp32] BUNDLE [TEXT ...]

Prints each TEXT, a tab and what the model makes of it; without a TEXT, each line of standard input. Line n of the
output belongs to line n of the input: for a text that cannot be decoded there is nothing behind the tab.
BUNDLE is made by: tfm-export onnx CHECKPOINT --generate`;

const BATCH = 32;

/** The model of a bundle in a folder. Where generate.onnx refers to weights.bin, the session finds that beside it. */
async function load(folder, variant) {
  const json = async (name) => JSON.parse(await readFile(join(folder, name), "utf8"));
  const manifest = await json("bundle.json");
  const vocabulary = new Vocabulary(await json("tokenizer/tokenizer.json"), manifest.special_ids);
  const session = await ort.InferenceSession.create(join(folder, graphName(manifest, variant)));
  return new Generator(ort, session, manifest, vocabulary);
}

/** The lines of a stream. Only a line feed ends one, with a carriage return in front of it or without. */
async function* linesOf(stream) {
  stream.setEncoding("utf8");
  let rest = "";
  let begun = false;
  for await (const chunk of stream) {
    const lines = (rest + (begun ? chunk : chunk.replace(/^\ufeff/, ""))).split("\n"); // without a byte order mark
    begun = true;
    rest = lines.pop();
    yield* lines.map((line) => line.replace(/\r$/, ""));
  }
  if (rest !== "") yield rest;
}

/** Print the answers to a batch of lines, one a line; those that cannot be decoded are told of and have none. */
async function answer(generator, lines, firstNumber) {
  const answers = new Array(lines.length).fill("");
  const places = [...lines.keys()].filter((i) => {
    try {
      return generator.encode(lines[i]);
    } catch (problem) {
      if (!(problem instanceof TextError)) throw problem;
      console.error(`line ${firstNumber + i}: ${JSON.stringify(lines[i])}: ${problem.message}`);
      process.exitCode = 1;
      return false;
    }
  });
  if (places.length > 0) {
    const found = await generator.generate(places.map((i) => lines[i]));
    found.forEach(({ text }, i) => (answers[places[i]] = text));
  }
  const oneLine = (text) => text.replace(/\r?\n/g, " ");
  process.stdout.write(answers.map((text, i) => `${oneLine(lines[i])}\t${oneLine(text)}\n`).join(""));
}

async function main() {
  const { values, positionals } = parseArgs({
    options: { variant: { type: "string", default: "fp32" }, help: { type: "boolean", short: "h" } },
    allowPositionals: true,
  });
  const [folder, ...texts] = positionals;
  if (values.help || folder === undefined) {
    console.log(USAGE);
    process.exitCode = values.help ? 0 : 2;
    return;
  }
  const generator = await load(folder, values.variant);
  let batch = [];
  let done = 0;
  for await (const line of texts.length > 0 ? texts : linesOf(process.stdin)) {
    batch.push(line);
    if (batch.length === BATCH) {
      await answer(generator, batch, done + 1);
      done += batch.length;
      batch = [];
    }
  }
  await answer(generator, batch, done + 1);
}

try {
  await main();
} catch (problem) {
  console.error(`Error: ${problem.message}`);
  process.exitCode = 1;
}
