/* Blocks: a strip of the program's segments, one colour for each fingerprint, and the blocks of each unique segment. */
MW.segmentColour = (fingerprint) => `hsl(${parseInt(fingerprint.slice(0, 6), 16) % 360} 55% 55%)`;
MW.section("blocks", "Blocks", "The parts of the program whose split follows from one contraction's split; segments of one colour do the same work.", (body) => {
  const { segments, runs, rows, count } = MW.plan().blocks, width = MW.room(body), high = 26;
  const out = MW.svg("svg", { width, viewBox: `0 0 ${width} ${high}`, class: "chart", role: "img", "aria-label": `${count} blocks in ${runs.length} segments, ${segments.length} of them unique` });
  for (const run of runs) {
    const x = (width * run.first) / count, segment = segments[run.segment];
    const box = MW.svg("rect", { x: x.toFixed(1), y: 2, width: Math.max(1, (width * run.size) / count - 1.5).toFixed(1), height: high - 4, rx: 2, fill: MW.segmentColour(segment.fingerprint) });
    const trips = run.trips > 1 ? `, ${run.trips} trips` : "";
    box.append(MW.svg("title", {}, document.createTextNode(`segment ${run.segment}, ${run.size} block${run.size > 1 ? "s" : ""}${trips}, search space ${segment.space}`)));
    out.append(box);
  }
  body.append(MW.el("div", { class: "card" }, out));
  body.append(MW.table([
    { key: "segment", name: "segment", num: true, show: (row) => `${row.segment} ${segments[row.segment].fingerprint.slice(0, 8)}` },
    { key: "number", name: "block", num: true }, { key: "name", name: "first contraction", wide: true }, { key: "choices", name: "choices" },
    { key: "operations", name: "operations", num: true }, { key: "times", name: "times a step", num: true },
  ], rows, { class: "blocks" }));
}, () => Boolean(MW.plan().blocks));
