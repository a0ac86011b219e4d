/* The small picture of a tensor's split: its last two split dims as a sheet, cut by the axes, with copies behind it. */
MW.picture = ({ shape, spec, mesh }) => {
  const parts = spec.map((axes) => axes.reduce((n, axis) => n * mesh[axis], 1));
  const copies = Object.values(mesh).reduce((n, size) => n * size, 1) / parts.reduce((n, p) => n * p, 1);
  const out = MW.svg("svg", { viewBox: "0 0 60 40", width: 60, height: 40, role: "img", class: "picture" });
  out.append(MW.svg("title", {}, document.createTextNode(`${parts.join(" × ") || 1} parts, each on ${copies} device${copies > 1 ? "s" : ""}`)));
  if (!shape.length) {
    out.append(MW.svg("circle", { cx: 30, cy: 20, r: 3, fill: "var(--faint)" }));
    return out;
  }
  const split = spec.map((axes, d) => (axes.length ? d : -1)).filter((d) => d >= 0);
  const across = shape.length === 1 ? 0 : split.length > 1 ? split[split.length - 1] : split.length === 1 && split[0] > 0 ? split[0] : shape.length - 1;
  const down = shape.length === 1 ? -1 : split.length > 1 ? split[0] : split.length === 1 && split[0] !== across ? split[0] : across === 0 ? 1 : 0;
  const shift = Math.min(3, Math.log2(copies));
  const x = 6, y = shape.length === 1 ? 15 : 5, width = 42 - shift, height = shape.length === 1 ? 9 : 29 - shift;
  for (let i = Math.ceil(shift); i > 0; i -= 1) out.append(MW.svg("rect", { x: x + 2 * i, y: y + 2 * i, width, height, rx: 2, fill: "var(--card)", stroke: "var(--faint)", "stroke-width": .7 }));
  const cells = (d) => (d < 0 ? 1 : Math.min(parts[d], 8));
  const columns = cells(across), rows = cells(down);
  const colour = (d) => (d >= 0 && spec[d].length ? `var(--${spec[d][0]})` : null);
  for (let r = 0; r < rows; r += 1) {
    for (let c = 0; c < columns; c += 1) {
      const first = r === 0 && c === 0;
      out.append(MW.svg("rect", {
        x: x + c * width / columns, y: y + r * height / rows, width: width / columns, height: height / rows,
        fill: colour(across) || colour(down) || "var(--faint)", opacity: split.length ? (first ? .95 : .16) : .45,
        stroke: "var(--card)", "stroke-width": .6,
      }));
    }
  }
  if (colour(down) && colour(across)) out.append(MW.svg("rect", { x, y, width: width / columns, height: height / rows, fill: colour(down), opacity: .55 }));
  out.append(MW.svg("rect", { x, y, width, height, rx: 2, fill: "none", stroke: "var(--soft)", "stroke-width": .8 }));
  return out;
};
