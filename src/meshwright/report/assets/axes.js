/* Axes of charts: round ticks with their units, a grid, and the labelled line of a limit. */
MW.round = (most, count) => {
  const raw = most / count, power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].find((s) => s * power >= raw * 0.999) * power;
  return Array.from({ length: Math.floor(most / step * 1.0001) + 1 }, (_, i) => Number((i * step).toPrecision(12)));
};
/* Values and their texts, between none and the most; all in the unit that suits the most. */
MW.ticks = (most, units, count = 4) => {
  const [scale, unit] = units.find(([size]) => most >= size) || units[units.length - 1];
  return MW.round(most / scale, count).map((v) => ({ value: v * scale, text: v ? `${v.toLocaleString("en")} ${unit}`.trim() : "0" }));
};
MW.byteUnits = ["PiB", "TiB", "GiB", "MiB", "KiB", "B"].map((unit, i) => [1024 ** (5 - i), unit]);
MW.timeUnits = (plan = MW.plan()) => (plan.abstract ? [[1, ""]] : [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]);
/* How wide a chart may be, so that its letters are as large on a phone as elsewhere. */
MW.room = (body) => Math.max(300, Math.min(1096, (body.clientWidth || 1132) - (innerWidth <= 720 ? 26 : 38)));
MW.words = (text, attributes) => MW.svg("text", attributes, document.createTextNode(text));

MW.byteAxis = (out, most, { left, right, y }) => {
  for (const tick of MW.ticks(most, MW.byteUnits)) out.append(MW.svg("line", { class: "grid", x1: left, x2: right, y1: y(tick.value), y2: y(tick.value) }), MW.words(tick.text, { class: "tick", x: left - 8, y: y(tick.value) + 4, "text-anchor": "end" }));
};
/* The limit is drawn if it is near the data and written as text otherwise: a distant limit would flatten the chart. */
MW.limitLine = (out, limit, most, { left, right, top, y }) => {
  if (!limit) return;
  const text = `limit ${MW.bytes(limit)}`;
  if (limit <= most) out.append(MW.svg("line", { class: "limit", x1: left, x2: right, y1: y(limit), y2: y(limit) }), MW.words(text, { class: "limit-text", x: right - 4, y: y(limit) - 5, "text-anchor": "end" }));
  else out.append(MW.words(`${text}, above this chart ↑`, { class: "limit-text", x: right - 4, y: top - 4, "text-anchor": "end" }));
};
/* The top of an axis: the limit too where it is near enough. */
MW.top = (most, limit) => (limit && limit < 2.5 * most ? Math.max(most, limit) : most) * 1.06 || 1;
