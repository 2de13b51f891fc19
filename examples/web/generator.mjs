/**
 * Texts in, texts out, by one call of a bundle's generate.onnx. The same file runs in browsers, over onnxruntime-web,
 * and in Node, over onnxruntime-node: copy it into your project.
 */

// White space as Python has it, which made the vocabulary; JavaScript's \s differs by a few characters.
const SPACE = "\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
const AROUND = new RegExp(`^[${SPACE}]+|[${SPACE}]+$`, "gu");
const BETWEEN = new RegExp(`[${SPACE}]+`, "u");

/** A text that the model cannot take. */
export class TextError extends Error {}

/** The ids that no text can name, whatever it spells. */
const notText = ({ pad, bos, eos }) => new Set([pad, bos, eos]);

/** A bundle's tokenizer of the kind "vocabulary": tokens are characters, or words between white space. */
export class Vocabulary {
  /**
   * @param {object} state - the contents of tokenizer/tokenizer.json
   * @param {{pad: number, bos: number, eos: number, unk: ?number, source_starts_with_bos: boolean,
   *   source_ends_with_eos: boolean, source: ?{pad: number, bos: ?number, eos: ?number, unk: ?number}}} special - the
   *   special_ids of bundle.json: those of targets, and in "source" those of sources, where they are others
   */
  constructor(state, special) {
    if (state.kind !== "vocabulary") {
      throw new Error(`the tokenizer is of kind "${state.kind}"; this example reads "vocabulary". Use ids instead.`);
    }
    this.source = state.source;
    this.target = state.target;
    this.special = special;
    this.ofSources = special.source ?? special;
    this.leftOut = notText(special);
    const reserved = notText(this.ofSources);
    this.ids = new Map(state.source.tokens.map((token, id) => [token, id]).filter(([, id]) => !reserved.has(id)));
  }

  /** The ids of a source text, as the encoder wants them. Throws a TextError. */
  encode(text) {
    const tokens = this.split(text.replace(AROUND, ""));
    if (tokens.length === 0) {
      throw new TextError("the text is empty");
    }
    const unknown = [...new Set(tokens.filter((token) => !this.ids.has(token)))];
    const { bos, eos, unk } = this.ofSources;
    if (unknown.length > 0 && unk === null) {
      throw new TextError(`the model does not know ${unknown.map((token) => JSON.stringify(token)).join(" ")}`);
    }
    const start = this.special.source_starts_with_bos ? [bos] : [];
    const end = this.special.source_ends_with_eos ? [eos] : [];
    return [...start, ...tokens.map((token) => this.ids.get(token) ?? unk), ...end];
  }

  split(text) {
    const cased = this.source.lowercase ? text.toLowerCase() : text;
    return this.source.split === "characters" ? [...cased] : cased.split(BETWEEN).filter((token) => token !== "");
  }

  /** The tokens of a target, without those that are not text. */
  decode(ids) {
    return ids.filter((id) => !this.leftOut.has(id)).map((id) => this.target.tokens[id]);
  }

  /** What stands between the tokens of a target. */
  get separator() {
    return this.target.split === "characters" ? "" : " ";
  }
}

/**
 * The place of a variant's generate.onnx in a bundle.
 *
 * @param {object} manifest - the contents of bundle.json
 * @param {string} variant - the precision, a folder under onnx/
 */
export function graphName(manifest, variant) {
  const name = `onnx/${variant}/generate.onnx`;
  if (!(name in manifest.files)) {
    throw new Error(`the bundle has no ${name}: tfm-export generate-graph BUNDLE --variant ${variant} makes it`);
  }
  return name;
}

/** A bundle's model, ready to be called. */
export class Generator {
  /**
   * @param {object} ort - onnxruntime-web or onnxruntime-node
   * @param {object} session - its InferenceSession of generate.onnx
   * @param {object} manifest - the contents of bundle.json
   * @param {Vocabulary} vocabulary
   */
  constructor(ort, session, manifest, vocabulary) {
    this.ort = ort;
    this.session = session;
    this.manifest = manifest;
    this.vocabulary = vocabulary;
  }

  /**
   * Decode texts, all in one call: a text's answer does not depend on the others.
   *
   * @param {string[]} texts
   * @returns {Promise<{text: string, tokens: string[], score: number, finished: boolean}[]>} score is the sum of the
   *   tokens' log-probabilities; finished tells that the target ended by itself, not at the length limit
   * @throws {TextError} for the first text that the model cannot take
   */
  async generate(texts) {
    const answers = await this.generateIds(texts.map((text) => this.encode(text)));
    return answers.map(({ ids, score, finished }) => {
      const tokens = this.vocabulary.decode(ids);
      return { text: tokens.join(this.vocabulary.separator), tokens, score, finished };
    });
  }

  /** The ids of a text, if they are not too many. Throws a TextError. */
  encode(text) {
    const ids = this.vocabulary.encode(text);
    const most = this.manifest.limits.max_source_length;
    if (ids.length > most) {
      throw new TextError(`the text has ${ids.length} tokens with those around it; the model takes ${most}`);
    }
    return ids;
  }

  /** The same from ids to ids: this is all that a model of another tokenizer needs. */
  async generateIds(sources) {
    const width = Math.max(...sources.map((source) => source.length));
    const padded = sources.flatMap((source) => Array.from({ length: width }, (_, i) => source[i] ?? 0));
    const { ids, lengths, scores } = await this.session.run({
      source_ids: this.integers(padded, [sources.length, width]),
      source_lengths: this.integers(sources.map((source) => source.length), [sources.length]),
      max_length: this.integers([this.manifest.generation.max_length], []),
    });
    const steps = ids.dims[1];
    return sources.map((_, row) => {
      const length = Number(lengths.data[row]);
      const target = Array.from(ids.data.slice(row * steps, row * steps + length), Number);
      return { ids: target, score: scores.data[row], finished: target.at(-1) === this.vocabulary.special.eos };
    });
  }

  integers(numbers, dims) {
    return new this.ort.Tensor("int64", BigInt64Array.from(numbers, BigInt), dims);
  }
}
