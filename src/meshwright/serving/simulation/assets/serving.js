/* A served model: what was planned, what a simulated load met with, and what each replica did over time. */
MW.figures = (facts) => MW.el("div", { class: "cards" }, facts.map(([name, figure]) => MW.el("div", { class: "card" }, MW.el("div", { class: "label" }, name), MW.el("div", { class: "figure" }, figure))));
MW.section("overview", "Overview", null, (body) => {
  const plan = MW.plan();
  body.append(
    MW.el("p", { class: "about" }, MW.el("span", {}, MW.el("b", {}, plan.title)), MW.el("span", {}, MW.data.date)),
    MW.el("h1", { id: "sentence" }, plan.promise), MW.figures(plan.facts),
    ...plan.sentences.map((text) => MW.el("p", { class: "note" }, text)),
  );
});
MW.section("arrangements", "Arrangements", "What was simulated; the first is the one that was chosen.", (body) => {
  const { columns, rows } = MW.plan().arrangements;
  body.append(MW.table(columns.map((name, i) => ({ key: String(i), name, wide: i === 0, num: i > 0 })), rows));
}, () => MW.plan().arrangements.rows.length > 0);

/* A distribution: which share of the requests took at most so long. */
MW.distribution = ({ name, limit, points }, width) => {
  const height = 220, left = 46, right = width - 10, top = 16, bottom = 26, most = MW.top(points.length ? points[points.length - 1][1] : 0, limit);
  const x = (v) => left + (right - left) * v / most, y = (share) => top + (height - top - bottom) * (1 - share);
  const out = MW.svg("svg", { width, viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": `${name}: half within ${MW.cost(points.length ? points[50][1] : 0)}` });
  for (const share of [0, .25, .5, .75, 1]) out.append(MW.svg("line", { class: "grid", x1: left, x2: right, y1: y(share), y2: y(share) }), MW.words(`${100 * share}%`, { x: left - 6, y: y(share) + 4, "text-anchor": "end" }));
  for (const tick of MW.ticks(most, MW.timeUnits())) out.append(MW.words(tick.text, { x: x(tick.value), y: height - 8, "text-anchor": x(tick.value) > right - 24 ? "end" : "middle" }));
  out.append(MW.svg("path", { d: points.map(([share, v], i) => `${i ? "L" : "M"}${x(v).toFixed(1)},${y(share).toFixed(1)}`).join(""), fill: "none", stroke: "var(--x)", "stroke-width": 2 }));
  if (limit && limit <= most) out.append(MW.svg("line", { class: "limit", x1: x(limit), x2: x(limit), y1: top, y2: height - bottom }), MW.words(`promised ${MW.cost(limit)}`, { class: "limit-text", x: x(limit) - 4, y: top + 10, "text-anchor": "end" }));
  const at = (share) => (points.find(([s]) => s >= share) || [0, null])[1];
  return MW.el("div", { class: "card" }, MW.el("div", { class: "label" }, name), out, MW.legend([.5, .9, .99].map((share) => ({ name: `${100 * share}% within`, colour: "var(--x)", text: MW.cost(at(share)) }))));
};
MW.section("latencies", "Latencies", "The share of the requests that took at most so long; a request that was refused never has a token.", (body) => {
  const narrow = innerWidth <= 720, width = narrow ? MW.room(body) : (MW.room(body) - 60) / 2;
  body.append(MW.el("div", { class: narrow ? "" : "two" }, MW.plan().latencies.filter((one) => one.points.length > 50).map((one) => MW.distribution(one, width))));
});
MW.section("replicas", "Replicas", "How busy they were, and with what.", (body) => {
  const percent = (key) => (row) => `${(100 * row[key]).toFixed(1)}%`;
  body.append(MW.table([
    { key: "name", name: "replica" }, { key: "split", name: "split" }, { key: "busy", name: "busy", num: true, show: percent("busy") },
    { key: "steps", name: "steps", num: true, show: (row) => row.steps.toLocaleString("en") }, { key: "step_s", name: "mean step", num: true, show: (row) => MW.cost(row.step_s) },
    { key: "tokens", name: "tokens computed", num: true, show: (row) => row.tokens.toLocaleString("en") }, { key: "batch", name: "mean batch", num: true, show: (row) => row.batch.toFixed(1) },
    { key: "blocks", name: "most of the cache", num: true, show: percent("blocks") },
  ], MW.plan().replicas, { most: 16 }));
});

/* Lanes over time, each an area up to its limit or its own most; the figures of one moment are read below it. */
MW.lanes = (line, width) => {
  const left = 118, right = width - 8, high = 26, parts = line.rows[0].lanes[0].values.length;
  const out = MW.svg("svg", { width, class: "chart", role: "img", "aria-label": `${line.rows.length - 1} replicas over ${MW.cost(line.seconds)}` });
  const x = (part) => left + (right - left) * part / parts, colours = { busy: "var(--compute)", running: "var(--x)", waiting: "var(--send)", cache: "var(--z)" };
  let y = 4;
  for (const row of line.rows) {
    out.append(MW.words(row.name, { class: "lane", x: 0, y: y + 12 }));
    y += 18;
    for (const lane of row.lanes) {
      const most = lane.limit || Math.max(...lane.values) || 1, tall = (v) => (y + high - high * Math.min(1, v / most)).toFixed(1);
      const path = lane.values.map((v, i) => `L${x(i).toFixed(1)},${tall(v)}L${x(i + 1).toFixed(1)},${tall(v)}`).join("");
      const text = most === 1 && lane.limit ? "" : ` (${lane.limit ? "of" : "most"} ${MW.digits(most)})`;
      out.append(
        MW.svg("line", { class: "grid", x1: left, x2: right, y1: y + high, y2: y + high }),
        MW.svg("path", { d: `M${left},${y + high}${path}L${right},${y + high}Z`, fill: colours[lane.name] || "var(--y)", opacity: .8, "data-lane": lane.name }),
        MW.words(lane.name + text, { class: "lane small", x: left - 8, y: y + 18, "text-anchor": "end" }),
      );
      y += high + 4;
    }
    y += 8;
  }
  for (const tick of MW.ticks(line.seconds, MW.timeUnits(), width < 600 ? 3 : 8)) out.append(MW.words(tick.text, { x: x(tick.value / line.seconds * parts), y: y + 10, "text-anchor": "middle" }));
  out.setAttribute("height", y + 16);
  out.setAttribute("viewBox", `0 0 ${width} ${y + 16}`);
  const cursor = MW.svg("line", { class: "cursor", y1: 0, y2: y, x1: -9, x2: -9 }), words = MW.el("div", { class: "legend", "aria-live": "polite" });
  const say = (part) => {
    cursor.setAttribute("x1", x(part + .5));
    cursor.setAttribute("x2", x(part + .5));
    const share = (lane) => (lane.limit === 1 ? `${(100 * lane.values[part]).toFixed(0)}%` : MW.digits(lane.values[part]));
    words.replaceChildren(MW.el("span", {}, "at ", MW.el("b", {}, MW.cost(part * line.seconds / parts))), ...line.rows.map((row) => MW.el("span", {}, `${row.name}: `, MW.el("b", {}, row.lanes.map((lane) => `${lane.name} ${share(lane)}`).join(", ")))));
  };
  out.append(cursor);
  out.addEventListener("pointermove", (event) => {
    const box = out.getBoundingClientRect(), part = Math.floor(((event.clientX - box.left) / box.width * width - left) / (right - left) * parts);
    if (part >= 0 && part < parts) say(part);
  });
  say(0);
  return MW.el("div", { class: "card" }, MW.el("div", { class: "tall" }, out), words);
};
MW.section("timeline", "Timeline", "Each replica over the simulated time: how busy it was, requests that run and wait, and how full its cache was. Hover to read one moment.", (body) => {
  const line = MW.plan().timeline;
  body.append(MW.lanes(line, MW.room(body)));
  if (line.left) body.append(MW.el("p", { class: "note" }, `${line.left} more replicas are in the table above only.`));
}, () => MW.plan().timeline.seconds > 0);
