// The page: from what the runs hold to its sections. On a page that is served it is drawn anew when the runs have changed.
"use strict";

const REFRESH = 5000;

function table(titles, rows, numbers = []) {
  const cell = (tag, value, i) => element(tag, numbers.includes(i) ? { class: "number" } : {}, value instanceof Node ? value : String(value));
  return element("div", { class: "wide" }, element("table", {},
    element("tr", {}, titles.map((title, i) => cell("th", title, i))),
    rows.map((row) => element("tr", {}, row.map((value, i) => cell("td", value, i))))));
}

const share = (value) => (100 * value).toFixed(1) + " %";
const interval = (value, low, high) => `${value.toFixed(3)} [${low.toFixed(3)}, ${high.toFixed(3)}]`;
const titled = (id, title, ...parts) => element("section", { id }, element("h2", {}, title), ...parts);

function comparisonSection(rows) {
  const signed = (value) => (value > 0 ? "+" : "") + value.toFixed(3);
  return rows.length ? titled("comparison", "Paired difference of evaluations", table(
    ["first", "second", "set", "problems", "first avg@k", "second avg@k", "difference [95 %]", "better / worse", "p"],
    rows.map((row) => [row.first, row.second, row.name, row.problems, row.a.toFixed(3), row.b.toFixed(3),
      `${signed(row.difference)} [${signed(row.low)}, ${signed(row.high)}]`, `${row.better} / ${row.worse}`, row.p]), [3, 4, 5, 6, 7, 8]),
    element("div", { class: "charts" }, rows.map((row) => pictureOf({ ...row.picture, title: rows.length > 1 ? `${row.second} less ${row.first}, ${row.picture.title}` : row.picture.title }))),
    element("p", { class: "hint" }, "Problem by problem, of the last evaluation of each; p: sign-flip permutation test. vapo-megatron compare says whether sampling was alike.")) : null;
}

function evaluationSection(runs) {
  const several = runs.length > 1, found = runs.flatMap((run) => run.sets.map((set) => [run, set]));
  if (!found.length) return null;
  const rows = found.map(([run, set]) => [...(several ? [run.name] : []), set.name, set.problems, set.samples,
    interval(set.avg_at_k, set.low, set.high),
    set.pass_at_k_interval ? interval(set.pass_at_k, ...set.pass_at_k_interval) : set.pass_at_k.toFixed(3),
    set.maj_at_k.toFixed(3), set.response_length.toFixed(1), share(set.truncated)]);
  const titles = [...(several ? ["run"] : []), "set", "problems", "k", "avg@k [95 %]", "pass@k [95 %]", "maj@k", "tokens", "truncated"];
  const problems = runs.flatMap((run) => run.problems.map((one) => [...(several ? [run.name] : []), one.set, one.id,
    `${one.correct} / ${one.samples}`, one.answer, one.majority ?? "–", one.response_length.toFixed(1), one.truncated]));
  return titled("evaluation", "Evaluation", table(titles, rows, rows[0].map((_, i) => i).slice(several ? 2 : 1)),
    problems.length ? element("details", {}, element("summary", {}, `${problems.length} problems`),
      table([...(several ? ["run"] : []), "set", "problem", "correct", "ground truth", "majority", "tokens", "truncated"], problems)) : null);
}

function timeSection(runs, live) {
  const parts = runs.filter((run) => run.phases.length).map((run) => {
    const gauges = [...new Set(run.phases.flatMap((phase) => Object.keys(phase.peaks)))];
    const rows = run.phases.map((phase) => [phase.name, short(phase.seconds), share(phase.share),
      element("span", { class: "bar", style: `width:${(phase.share * 180).toFixed(0)}px` }),
      ...gauges.map((gauge) => (phase.peaks[gauge] ? phase.peaks[gauge].toFixed(2) : "–"))]);
    const titles = ["phase", "seconds", "share", "", ...gauges.map((gauge) => (gauge === "memory" ? "peak, host GiB" : `peak, ${gauge.replaceAll("_", " ")} GiB`))];
    return [runs.length > 1 ? element("h3", {}, run.name) : null, table(titles, rows, [1, 2, ...gauges.map((_, i) => i + 4)])];
  });
  const traces = runs.flatMap((run) => run.traces.map((name) => element("li", {},
    live ? element("code", {}, `${run.directory}/profile/${name}`) // its server has the page alone
      : element("a", { href: `${runs.length > 1 ? run.directory + "/" : ""}profile/${name}`, download: "" }, name))));
  if (traces.length) parts.push([element("h3", {}, "Traces"), element("p", {},
    "Open traces (.json.gz) in ui.perfetto.dev, histories of GPU memory (.pickle) in pytorch.org/memory_viz."), element("ul", {}, traces)]);
  return parts.length ? titled("time", "Time and memory", ...parts.flat()) : null;
}

function draw(data, live) {
  const runs = data.runs, several = runs.length > 1, alarms = runs.flatMap((run) => run.alarms.map((row) => [run, row]));
  const drawn = data.panels
    .map((panel) => (several && panel.stacked ? { ...panel, title: "Seconds per step", stacked: false, curves: [{ metric: "time/step", label: "step" }] } : panel))
    .map((panel) => chart(panel, runs)).filter(Boolean);
  const sections = [
    alarms.length ? titled("alarms", "Alarms", table([...(several ? ["run"] : []), "alarm", "steps", "meaning", "look at first"],
      alarms.map(([run, row]) => [...(several ? [run.name] : []), element("b", { class: "wrong" }, row.name), row.steps, row.meaning, row.remedy.replaceAll("`", "")]))) : null,
    comparisonSection(data.comparisons),
    evaluationSection(runs),
    picturesSection(runs),
    drawn.length ? titled("curves", "Curves", element("div", { class: "charts" }, drawn)) : null,
    timeSection(runs, live),
    samplesSection(runs),
    ...runs.map((run, i) => titled("setup" + i, several ? `Environment and config of ${run.name}` : "Environment and config",
      element("details", {}, element("summary", {}, "environment"), element("pre", {}, run.environment)),
      element("details", {}, element("summary", {}, "config"), element("pre", {}, run.config)))),
  ].filter(Boolean);
  const page = document.getElementById("page"), place = window.scrollY;
  page.replaceChildren(
    element("h1", {}, runs.map((run) => run.name).join(" · ")),
    ...runs.map((run, r) => element("p", { class: "where" }, several ? swatch(colorOf(r)) : null,
      `${run.steps ? run.steps + " steps · " : ""}${run.directory}${live ? " · follows the run" : ""}`,
      element("span", { class: "facts" }, Object.entries(run.facts).map(([name, fact]) => element("span", {}, name + " ", element("b", {}, fact)))))),
    element("nav", {}, sections.map((section) => element("a", { href: "#", "data-to": section.id }, section.querySelector("h2").textContent))),
    ...runs.map((run, r) => element("div", { class: "summary" }, several ? element("h3", {}, swatch(colorOf(r)), run.name) : null,
      element("div", { class: "figures" }, run.headline.map(([label, figure, beside]) => element("div", {},
        element("span", { class: "label" }, label), element("span", { class: "figure" }, figure), element("span", { class: "label" }, beside)))))),
    ...sections);
  page.querySelectorAll("nav a").forEach((link) => link.addEventListener("click", (event) => {
    event.preventDefault(); // what stands behind # is what is chosen of the samples
    document.getElementById(link.dataset.to).scrollIntoView();
  }));
  window.scrollTo(0, place);
}

(function start() {
  const live = document.body.dataset.live === "1";
  let text = document.getElementById("data").textContent;
  draw(JSON.parse(text), live);
  if (!live) return;
  setInterval(async () => {
    try {
      const found = await (await fetch("/data.json")).text();
      if (found !== text) { text = found; draw(JSON.parse(text), live); }
    } catch (error) { console.log("not reachable: " + error); }
  }, REFRESH);
})();
