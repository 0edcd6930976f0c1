// Responses to browse: chosen, sorted, their tokens coloured. What is chosen stands in the address, behind #.
"use strict";

const PAGE = 20;
const KEYS = { step: (s) => s.step ?? -1, reward: (s) => s.reward ?? Number(s.correct), length: (s) => s.tokens ?? 0 };

function chosen() {
  const found = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  return { run: "0", origin: "", grade: "", sort: "step", order: "down", colour: "values", from: "0", ...found };
}

function choose(change) {
  const all = { ...chosen(), from: "0", ...change };
  history.replaceState(null, "", "#" + new URLSearchParams(all));
}

const originOf = (sample) => (sample.step !== undefined ? "step " + sample.step : sample.set);

function samplesShown(samples, state) {
  const key = KEYS[state.sort] || KEYS.step, sign = state.order === "up" ? 1 : -1;
  return samples
    .filter((s) => !state.origin || originOf(s) === state.origin)
    .filter((s) => !state.grade || Boolean(s.correct) === (state.grade === "correct"))
    .map((s, i) => [s, i])
    .sort((a, b) => sign * (key(a[0]) - key(b[0])) || a[1] - b[1])
    .map(([s]) => s);
}

// Blue is high, red is low, by how far a number is from the middle of the scale.
function tint(value, scale) {
  const share = Math.max(-1, Math.min(1, (value - scale.middle) / (scale.width || 1)));
  const colour = share < 0 ? "220, 38, 38" : "37, 99, 235";
  return `rgba(${colour}, ${(0.08 + 0.6 * Math.abs(share)).toFixed(2)})`;
}

function tokensOf(estimates, colour) {
  const numbers = estimates[colour] || estimates.advantages || [];
  const written = numbers.filter((number) => number !== null);
  const low = Math.min(...written), high = Math.max(...written);
  // Advantages are around 0; values within what this response spans.
  const scale = colour === "advantages" || !estimates.values
    ? { middle: 0, width: Math.max(Math.abs(low), Math.abs(high)) }
    : { middle: (low + high) / 2, width: (high - low) / 2 };
  const half = estimates.left_out ? estimates.tokens.length / 2 : -1;
  const several = numbers.includes(null);
  let turn = 0;
  return estimates.tokens.flatMap((text, i) => {
    const observed = numbers[i] === null;
    const begins = several && (i === 0 || observed !== (numbers[i - 1] === null));
    const value = estimates.values && !observed ? `, value ${short(estimates.values[i])}` : "";
    const marker = begins ? [element("span", { class: "turn" }, observed ? "observed" : `turn ${++turn}${value}`)] : [];
    const said = observed ? "observed" : ["values", "advantages", "rewards"].filter((name) => estimates[name] && estimates[name][i] !== null)
      .map((name) => `${name.slice(0, -1)} ${short(estimates[name][i])}`).join(", ");
    const style = observed ? "opacity:0.6;font-style:italic" : `background:${tint(numbers[i], scale)}`;
    // A token that ends within a character, or is special, has no text of its own.
    const token = element("span", { class: "token", title: `token ${i < half || half < 0 ? i : i + estimates.left_out}: ${said}`, style }, text || "·");
    return [...(i === half ? [element("span", { class: "where" }, ` … ${estimates.left_out} tokens … `)] : []), ...marker, token];
  });
}

// An episode without estimates: what the policy wrote, tool calls and all, and what it was given.
function turnsOf(turns) {
  let turn = 0;
  return turns.flatMap(({ observed, text }) => [element("span", { class: "turn" }, observed ? "observed" : `turn ${++turn}`),
                                                element("span", observed ? { class: "observed" } : {}, text)]);
}

function sampleView(sample, colour) {
  const grade = sample.correct ? ["right", "correct"] : ["wrong", "incorrect"];
  const facts = [originOf(sample), `problem ${sample.prompt_id ?? sample.id}`, `${sample.tokens} tokens`, sample.finish_reason,
                 sample.reward !== undefined && sample.reward !== null ? `reward ${short(sample.reward)}` : null, sample.grade_reason,
                 ...(sample.episode ? [`${sample.episode.turns} turns`, sample.episode.tool_errors ? `${sample.episode.tool_errors} tool errors` : null] : [])];
  const coloured = sample.estimates && colour !== "none";
  return element("article", { class: "sample" },
    element("header", {}, element("span", { class: grade[0] }, grade[1]), facts.filter(Boolean).map((fact) => element("span", {}, String(fact)))),
    element("div", { class: "problem" }, `${sample.problem}\nground truth: ${sample.answer}`),
    element("div", { class: "response" }, coloured ? tokensOf(sample.estimates, colour) : sample.turns ? turnsOf(sample.turns) : String(sample.response)));
}

function select(name, value, options, redraw) {
  const made = element("select", { name }, options.map(([key, text]) => element("option", { value: key }, text)));
  made.value = value;
  made.addEventListener("change", () => { choose({ [name]: made.value }); redraw(); });
  return made;
}

function samplesSection(runs) {
  const with_samples = runs.map((run, i) => [String(i), run.name]).filter(([i]) => runs[i].samples.length);
  if (!with_samples.length) return null;
  const section = element("section", { id: "samples" });
  const redraw = () => {
    const state = chosen();
    if (!with_samples.some(([i]) => i === state.run)) state.run = with_samples[0][0];
    const samples = runs[Number(state.run)].samples;
    const origins = [...new Set(samples.map(originOf))];
    if (!origins.includes(state.origin)) state.origin = "";
    const shown = samplesShown(samples, state), from = Math.min(Number(state.from) || 0, Math.max(0, shown.length - 1));
    const more = (to, text) => {
      const button = element("button", {}, text);
      button.addEventListener("click", () => { choose({ from: String(to) }); redraw(); });
      return button;
    };
    section.replaceChildren(
      element("h2", {}, "Samples"),
      element("div", { class: "controls" },
        with_samples.length > 1 ? select("run", state.run, with_samples, redraw) : null,
        select("origin", state.origin, [["", "all"], ...origins.map((o) => [o, o])], redraw),
        select("grade", state.grade, [["", "correct and not"], ["correct", "correct"], ["incorrect", "incorrect"]], redraw),
        select("sort", state.sort, [["step", "sort by step"], ["reward", "sort by reward"], ["length", "sort by length"]], redraw),
        select("order", state.order, [["down", "highest first"], ["up", "lowest first"]], redraw),
        samples.some((s) => s.estimates)
          ? select("colour", state.colour, [["values", "tokens by value"], ["advantages", "tokens by advantage"], ["none", "no colours"]], redraw) : null,
        element("span", { class: "where" }, `${shown.length} of ${samples.length} responses here; all are in ${runs[Number(state.run)].directory}`)),
      ...shown.slice(from, from + PAGE).map((sample) => sampleView(sample, state.colour)),
      element("div", { class: "controls" },
        from > 0 ? more(Math.max(0, from - PAGE), "previous") : null,
        from + PAGE < shown.length ? more(from + PAGE, "next") : null));
  };
  redraw();
  return section;
}
