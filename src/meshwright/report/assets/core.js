/* Shared by all parts of the page: the data, elements, formatted figures, and the redrawing when another plan is chosen. */
"use strict";
const MW = { data: JSON.parse(document.getElementById("data").textContent), which: 0, sections: [] };
MW.plan = () => MW.data.plans[MW.which];

MW.el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  MW.set(node, attributes);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
};
MW.svg = (tag, attributes = {}, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.flat());
  return node;
};
MW.set = (node, attributes) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value);
  }
};

MW.bytes = (size) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let i = 0;
  while (Math.abs(size) >= 1024 && i < units.length - 1) { size /= 1024; i += 1; }
  return i === 0 ? `${Math.round(size)} B` : `${size.toFixed(2)} ${units[i]}`;
};
MW.digits = (value) => {
  const rounded = Number(Number(value).toPrecision(3));
  if (Math.abs(rounded) >= 1000) return Math.round(value).toLocaleString("en");
  return rounded === Number(value) ? String(rounded) : Number(value).toPrecision(3); // 1.004 s is 1.00 s, not 1 s
};
MW.cost = (seconds, plan = MW.plan()) => {
  if (seconds === null || seconds === undefined) return "";
  if (plan.abstract) return Number(seconds.toPrecision(6)).toLocaleString("en");
  const size = Number(Math.abs(seconds).toPrecision(3)); // 999.6 µs are 1.00 ms
  for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) if (size >= scale) return `${MW.digits(seconds / scale)} ${unit}`;
  return size === 0 ? "0 s" : size < 1e-11 ? "under 0.01 ns" : `${MW.digits(seconds / 1e-9)} ns`;
};
MW.signed = (seconds, plan = MW.plan()) => {
  if (Math.abs(seconds) <= 1e-9 * plan.cost.total) return "+0";
  return (seconds >= 0 ? "+" : "−") + MW.cost(Math.abs(seconds), plan);
};
MW.percent = (part, whole) => (whole ? `${(100 * part / whole).toFixed(1)}%` : "");

MW.legend = (parts) => MW.el("div", { class: "legend" }, parts.map((part) => {
  const dot = MW.el("span", { class: "dot" });
  dot.style.background = part.colour;
  return MW.el("span", {}, dot, `${part.name} `, MW.el("b", {}, part.text));
}));

/* B_x S D with the axes as coloured subscripts. */
MW.symbols = (text) => {
  const out = MW.el("span", { class: "mono symbols", "data-text": text });
  for (const token of text.split(/(\s+)/)) {
    const cut = token.lastIndexOf("_");
    if (cut > 0 && /^[xyz]+$/.test(token.slice(cut + 1))) {
      out.append(token.slice(0, cut));
      const low = MW.el("sub");
      for (const axis of token.slice(cut + 1)) low.append(MW.el("span", { class: `axis-${axis}` }, axis));
      out.append(low);
    } else out.append(token);
  }
  return out;
};

/* A section is drawn when it comes near the screen, and again when another plan is chosen. */
MW.order = ["overview", "difference", "arrangements", "latencies", "replicas", "stages", "stage-memory", "timeline", "instructions", "tensors", "layer", "memory", "communication", "blocks", "operations", "decisions", "views"];
MW.section = (id, title, lead, draw, wanted = () => true) => MW.sections.push({ id, title, lead, draw, wanted });
MW.render = () => {
  const main = document.getElementById("main"), nav = document.getElementById("nav");
  main.replaceChildren();
  nav.replaceChildren();
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      MW.draw(entry.target);
      seen.unobserve(entry.target);
    }
    MW.here();
  }, { rootMargin: "500px" });
  for (const section of MW.sections.filter((s) => s.wanted()).sort((a, b) => MW.order.indexOf(a.id) - MW.order.indexOf(b.id))) {
    const body = MW.el("div", { class: "body" });
    const node = MW.el("section", { id: section.id, "aria-label": section.title });
    if (section.lead !== null) node.append(MW.el("h2", {}, section.title), MW.el("p", { class: "lead" }, section.lead));
    node.append(body);
    node.todo = () => section.draw(body);
    main.append(node);
    nav.append(MW.el("a", { href: `#${section.id}` }, section.title));
    seen.observe(node);
  }
};
/* Marks the section that the reader is in. */
MW.here = () => {
  const links = [...document.querySelectorAll("nav a")];
  const passed = links.filter((link) => document.getElementById(link.hash.slice(1)).getBoundingClientRect().top < 140);
  links.forEach((link) => link.classList.toggle("here", link === (passed[passed.length - 1] || links[0])));
};
MW.draw = (node) => {
  if (!node || !node.todo) return;
  const todo = node.todo;
  node.todo = null;
  todo();
};
