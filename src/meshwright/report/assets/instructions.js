/* What each stage does in a step, in order: a strip of all stages, and the list of one of them. */
MW.doColours = { ...MW.workColours, send: "var(--send)", receive: "var(--r2)", exchange: "var(--gradients)" };
MW.instruction = ([what, work, microbatch, chunk, peer, round]) => {
  const of = microbatch < 0 ? "shared parameters" : `${work} ${microbatch} of chunk ${chunk}`;
  if (what === "free") return `free microbatch ${microbatch} of chunk ${chunk}`;
  if (what === "run") return `run ${of}`;
  return what === "update" || what === "exchange" ? `${what} ${round}` : `${what} ${of} ${what === "send" ? "to" : "from"} stage ${peer}`;
};
MW.section("instructions", "Instructions", "What each stage does in a step, in order. The runtime carries out these lists, and the simulator plays them.", (body) => {
  const lists = MW.plan().instructions, width = MW.room(body), left = 62, high = 18, most = Math.max(...lists.map((own) => own.shown.length)), cell = Math.min(14, (width - left) / most);
  const out = MW.svg("svg", { width, viewBox: `0 0 ${width} ${lists.length * (high + 4)}`, class: "chart instructions", role: "img", "aria-label": "instructions of all stages" });
  lists.forEach((own, stage) => {
    out.append(MW.words(`stage ${stage}`, { x: 0, y: stage * (high + 4) + 13, class: "lane" }));
    own.shown.forEach((one, i) => {
      if (one[0] === "free") return;
      const wide = one[0] === "run" || one[0] === "update", tall = wide ? high : high / 2;
      const node = MW.svg("rect", { x: left + i * cell, y: stage * (high + 4) + (high - tall) / 2, width: Math.max(.4, cell * .9), height: tall, class: `one ${one[0]}`, fill: MW.doColours[one[0] === "run" ? one[1] : one[0]] });
      node.append(MW.svg("title", {}, document.createTextNode(MW.instruction(one))));
      out.append(node);
    });
  });
  const list = MW.el("ol", { class: "mono instruction-list" }), more = MW.el("p", { class: "lead" });
  const show = (stage) => {
    const own = lists[stage];
    list.replaceChildren(...own.shown.map((one) => MW.el("li", {}, MW.instruction(one))));
    more.textContent = own.left_out ? `and ${own.left_out} more: plan.instructions(${stage}) has them all` : "";
  };
  const choose = MW.el("select", { "aria-label": "Instructions of which stage", onchange: (e) => show(Number(e.target.value)) }, lists.map((_, i) => MW.el("option", { value: i }, `stage ${i}`)));
  const kinds = ["forward", "backward", "weights", "send", "receive", "exchange", "update"].filter((kind) => lists.some((own) => own.shown.some((one) => (one[0] === "run" ? one[1] : one[0]) === kind)));
  body.append(MW.el("div", { class: "card" }, out, MW.legend(kinds.map((kind) => ({ name: kind, colour: MW.doColours[kind], text: "" })))), MW.el("div", { class: "row" }, choose), MW.el("div", { class: "tall" }, list), more);
  show(0);
}, () => (MW.plan().instructions || []).length > 0);
