/* The model's tensors as a tree: a picture of each split, its kind, and its alternatives when it is opened. */
/* The changes of an alternative. A lower bound is not a price, so it is neither good nor bad; a negative one proves nothing. */
MW.price = (a) => {
  if (a.difference === null) return MW.el("td", { class: "num bound" }, "impossible");
  if (a.sure === "at least") return MW.el("td", { class: "num bound" }, a.difference > 1e-9 * MW.plan().cost.total ? `≥ ${MW.signed(a.difference)}` : "unknown");
  return MW.el("td", { class: `num ${a.difference > 0 ? "more" : "less"}` }, `${a.sure === "at most" ? "≤ " : ""}${MW.signed(a.difference)}`);
};
MW.unsure = (a) => {
  if (a.difference === null || a.sure !== "at least") return [];
  const slack = a.difference < -1e-9 * MW.plan().cost.total ? `not cheaper by more than ${MW.cost(-a.difference)}` : a.difference > 1e-9 * MW.plan().cost.total ? null : "not cheaper";
  return [a.peak ? "the fastest such plan does not fit" : "lower bound only, not solved for", slack];
};
MW.alternatives = (row) => {
  const out = MW.el("div", { class: "detail" });
  out.append(MW.el("p", {}, MW.el("b", {}, row.words), `, ${row.dtype} ${row.shape.join("×") || "scalar"}, ${MW.bytes(row.bytes)} on a device`, row.count > 1 ? `; ${row.count} alike: ${row.paths.join(", ")}${row.count > row.paths.length ? ", …" : ""}` : ""));
  if (!row.alternatives) {
    out.append(MW.el("p", { class: "note" }, "For the alternatives, run: ", MW.el("code", {}, `meshwright explain plan.json ${row.paths[0]}`)));
    return out;
  }
  out.append(MW.el("p", { class: "reason" }, `Why: ${row.reason}`));
  if (row.counts) out.append(MW.el("p", { class: "note" }, `On stage ${row.stage}; ${row.counts}.`));
  if (!row.alternatives.length) return out;
  const effects = (a) => (row.counts ? [a.microbatch, a.once].map((s) => MW.el("td", { class: "num" }, a.difference === null || a.sure === "at least" ? "" : MW.signed(s))) : []);
  const rows = row.alternatives.map((a) => MW.el("tr", {},
    MW.el("td", { class: "fixed" }, MW.symbols(a.symbols)), MW.el("td", { class: "wide" }, a.words), effects(a),
    MW.price(a),
    MW.el("td", { class: "num" }, a.peak ? MW.bytes(a.peak) : ""),
    MW.el("td", { class: "wide" }, [a.allowed ? null : "the method does not allow it", a.fits ? null : "does not fit", ...MW.unsure(a), ...a.changes.map(([what, where, s]) => `${MW.signed(s)} ${what}: ${where}`)].filter(Boolean).join("; "))));
  out.append(MW.el("div", { class: "scroll" }, MW.el("table", { class: "alternatives" }, MW.el("thead", {}, MW.el("tr", {}, ["instead", "in words", ...(row.counts ? ["a microbatch", "once"] : []), "step", "memory", "because"].map((t) => MW.el("th", { class: /^(instead|in words|because)$/.test(t) ? "" : "num" }, t)))), MW.el("tbody", {}, rows))));
  if (row.alternatives.some((a) => a.sure === "at least" && !a.peak)) out.append(MW.el("p", { class: "note" }, "There was no time to solve for all of them; ≥ marks a lower bound. What they really cost: ", MW.el("code", {}, `meshwright explain plan.json ${row.paths[0]}`)));
  if (row.left) out.append(MW.el("p", { class: "note" }, `${row.left} more were not priced: `, MW.el("code", {}, `meshwright explain plan.json ${row.paths[0]} --seconds 10`)));
  return out;
};

MW.tree = (rows) => {
  const root = { name: "", kids: new Map(), rows: [], held: [] };
  for (const row of rows) {
    let at = root;
    const keys = row.path.split("/");
    keys.slice(0, -1).forEach((key) => {
      if (!at.kids.has(key)) at.kids.set(key, { name: key, kids: new Map(), rows: [], held: row.held.map(() => 0) });
      at = at.kids.get(key);
      row.held.forEach((size, stage) => { at.held[stage] += size; });
    });
    at.rows.push(row);
  }
  return root;
};

MW.section("tensors", "Tensors", "Every argument and result; layers with the same split share one row. Click a row for the reason and the alternatives.", (body) => {
  const plan = MW.plan(), holder = MW.el("div", { class: "card flush tree", role: "tree" }), count = MW.el("span", { class: "label" });
  const leaf = (row, depth) => {
    const name = MW.el("span", { class: "name" }, row.path.split("/").pop(), row.count > 1 ? MW.el("span", { class: "count" }, `  ×${row.count}${row.which ? `: ${row.which}` : ""}`) : null);
    name.style.paddingLeft = `${depth * 16}px`;
    const node = MW.el("button", { class: "leaf", type: "button", role: "treeitem", "aria-expanded": "false", "data-path": row.path, title: row.path },
      name, MW.picture(row), MW.symbols(row.symbols), MW.el("span", {}, MW.el("span", { class: "tag" }, row.kind)), MW.el("span", { class: "num" }, MW.bytes(row.bytes)));
    node.addEventListener("click", () => {
      const open = node.getAttribute("aria-expanded") === "true";
      node.setAttribute("aria-expanded", String(!open));
      if (open) node.nextSibling.remove();
      else node.after(MW.alternatives(row));
    });
    return node;
  };
  const branch = (at, depth, open) => {
    const kids = MW.el("div", { role: "group" });
    let filled = false;
    const fill = () => {
      if (filled) return;
      filled = true;
      for (const kid of at.kids.values()) kids.append(...branch(kid, depth + 1, depth < 4));
      for (const row of at.rows) kids.append(leaf(row, depth + 1));
    };
    const name = MW.el("span", { class: "name" }, `${open ? "▾" : "▸"} ${at.name}`);
    name.style.paddingLeft = `${depth * 16}px`;
    const node = MW.el("button", { class: "branch", type: "button", role: "treeitem", "aria-expanded": String(open) }, name, MW.el("span"), MW.el("span"), MW.el("span"), MW.el("span", { class: "num" }, MW.bytes(Math.max(...at.held))));
    node.toggle = (wanted) => {
      node.setAttribute("aria-expanded", String(wanted));
      name.textContent = `${wanted ? "▾" : "▸"} ${at.name}`;
      kids.hidden = !wanted;
      if (wanted) fill();
    };
    node.addEventListener("click", () => node.toggle(node.getAttribute("aria-expanded") !== "true"));
    node.toggle(open);
    return [node, kids];
  };
  const fill = (wanted) => {
    const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = plan.tensors.filter((row) => words.every((word) => `${row.path} ${row.paths.join(" ")} ${row.kind} ${row.symbols} ${row.role}`.toLowerCase().includes(word)));
    const root = MW.tree(shown);
    const optimizer = new Set(plan.tensors.filter((r) => r.role === "optimizer").map((r) => r.path.split("/").slice(0, 2).join("/")));
    holder.replaceChildren(...root.rows.map((row) => leaf(row, 0)), ...[...root.kids.values()].flatMap((kid) => branch(kid, 0, true)));
    if (!words.length) for (const node of holder.querySelectorAll(".branch")) if (optimizer.has(`state/${node.firstChild.textContent.slice(2)}`)) node.toggle(false);
    count.textContent = `${shown.length} of ${plan.tensors.length} rows`;
  };
  holder.addEventListener("keydown", (event) => {
    const nodes = [...holder.querySelectorAll(".leaf, .branch")].filter((n) => n.offsetParent), i = nodes.indexOf(document.activeElement);
    if (i < 0) return;
    if (event.key === "ArrowDown" && nodes[i + 1]) nodes[i + 1].focus();
    else if (event.key === "ArrowUp" && nodes[i - 1]) nodes[i - 1].focus();
    else if (event.key === "ArrowRight" && nodes[i].toggle) nodes[i].toggle(true);
    else if (event.key === "ArrowLeft" && nodes[i].toggle) nodes[i].toggle(false);
    else return;
    event.preventDefault();
  });
  const search = MW.el("input", { type: "search", id: "tensor-search", placeholder: "path, kind or sharding", "aria-label": "Search tensors", oninput: (e) => fill(e.target.value) });
  body.append(MW.el("div", { class: "row" }, search, count), holder);
  fill("");
});
