/* A table that sorts by any column and searches in all of them, and a list that draws only the lines on the screen.
   Columns: num is to the right; fixed breaks nowhere; cut ends in an ellipsis; wide has room for sentences. */
MW.table = (columns, rows, options = {}) => {
  let sorted = options.sorted || null, up = false, wanted = "", whole = !options.most;
  const body = MW.el("tbody"), head = MW.el("tr"), count = MW.el("span", { class: "label" });
  const style = (column) => ["num", "fixed", "cut", "wide"].filter((name) => column[name]).join(" ");
  const cells = columns.map((column) => {
    const cell = MW.el("th", { class: column.num ? "num" : "", "aria-sort": "none" }, MW.el("button", { type: "button", onclick: () => by(column) }, column.name));
    head.append(cell);
    return cell;
  });
  const by = (column) => {
    up = sorted === column.key ? !up : !column.num;
    sorted = column.key;
    fill();
  };
  const fill = () => {
    const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = rows.filter((row) => words.every((word) => columns.some((c) => String(row[c.key] ?? "").toLowerCase().includes(word))));
    if (sorted) {
      const compare = (a, b) => (a === b ? 0 : a === null ? 1 : b === null ? -1 : a < b ? -1 : 1);
      shown = [...shown].sort((a, b) => compare(a[sorted], b[sorted]) * (up ? 1 : -1));
    }
    columns.forEach((c, i) => cells[i].setAttribute("aria-sort", c.key === sorted ? (up ? "ascending" : "descending") : "none"));
    const some = whole || shown.length <= options.most + 2 ? shown : shown.slice(0, options.most);
    more.hidden = some.length === shown.length && !(whole && options.most && shown.length > options.most + 2);
    more.textContent = whole ? `Show ${options.most} rows` : `Show all ${shown.length} rows`;
    body.replaceChildren(...some.map((row) => MW.el("tr", {}, columns.map((c) => MW.el("td", { class: style(c), "data-name": c.name }, c.show ? c.show(row) : String(row[c.key] ?? ""))))));
    count.textContent = shown.length === rows.length ? `${rows.length} rows` : `${shown.length} of ${rows.length} rows`;
  };
  const more = MW.el("button", { type: "button", class: "more-rows", onclick: () => { whole = !whole; fill(); } });
  fill();
  const table = MW.el("div", {}, MW.el("div", { class: "card flush scroll", tabindex: "0", role: "region", "aria-label": options.class || "table" }, MW.el("table", { class: options.class || "" }, MW.el("thead", {}, head), body)), more);
  if (!options.search) return table;
  const search = MW.el("input", { type: "search", placeholder: options.search, "aria-label": options.search, oninput: (e) => { wanted = e.target.value; fill(); } });
  return MW.el("div", {}, MW.el("div", { class: "row" }, search, count), table);
};

MW.list = (length, line, height = 26) => {
  const view = MW.el("div", { class: "virtual", tabindex: "0", role: "list" }), inner = MW.el("div");
  inner.style.position = "relative";
  view.append(inner);
  let order = null;
  const draw = () => {
    const count = order ? order.length : length;
    inner.style.height = `${count * height}px`;
    const first = Math.max(0, Math.floor(view.scrollTop / height) - 6), last = Math.min(count, first + Math.ceil(view.clientHeight / height) + 14);
    const lines = [];
    for (let i = first; i < last; i += 1) {
      const node = line(order ? order[i] : i);
      node.style.top = `${i * height}px`;
      lines.push(node);
    }
    inner.replaceChildren(...lines);
  };
  view.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
  view.show = (some) => { order = some; view.scrollTop = 0; draw(); };
  requestAnimationFrame(draw);
  return view;
};
