"use strict";
// Asks the server once a second how it does, and shows it. Text is only ever set as text.
const byId = (id) => document.getElementById(id);
const show = (id, text) => { byId(id).textContent = text; };
const count = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const time = (s) => s === null ? "–" : s < 1 ? `${(1000 * s).toPrecision(3)} ms` : `${s.toPrecision(3)} s`;
const part = (value) => `${(100 * value).toFixed(1)}%`;
const SECONDS = 120;
let key = sessionStorage.getItem("key") || "";

function draw(svg, values) {
  const top = Math.max(...values, 1e-9), left = SECONDS - values.length;
  const line = values.map((value, at) => `L${left + at},${(60 - 56 * value / top).toFixed(2)}`).join("");
  svg.setAttribute("viewBox", `0 0 ${SECONDS - 1} 62`);
  svg.setAttribute("preserveAspectRatio", "none");
  const path = svg.firstChild || svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
  path.setAttribute("d", values.length ? `M${left},60${line}L${SECONDS - 1},60Z` : "");
}

function state(text, isGood) {
  show("state", text);
  byId("state").className = `state ${isGood ? "good" : "bad"}`;
}

function update(data) {
  const engine = data.engine, last = data.points.at(-1);
  show("model", data.model);
  document.title = `${data.model} · Meshwright server`;
  state(data.ready ? "ready" : "loading the model", data.ready);
  show("about", `Meshwright ${data.version}${data.max_len ? ` · up to ${count(data.max_len)} tokens` : ""}`);
  show("restarts", data.restarts);
  [["first", data.first_token_s], ["token", data.per_token_s]].forEach(([name, [median, most]]) => {
    show(`${name}_50`, time(median));
    show(`${name}_99`, time(most));
  });
  document.querySelectorAll("[data-figure]").forEach((card) => {
    draw(card.querySelector("svg"), data.points.map((point) => point[card.dataset.figure]));
  });
  if (last) {
    show("tokens_out", count(last.tokens_out));
    show("tokens_in", count(last.tokens_in));
  }
  if (!engine) return;
  show("running", engine.running);
  show("waiting", engine.waiting);
  show("slots", engine.slots);
  show("cache", part(engine.blocks_used / Math.max(engine.blocks, 1)));
  show("blocks", `${count(engine.blocks_used)} of ${count(engine.blocks)}`);
  show("hits", part(engine.prefix_hits / Math.max(engine.tokens_in, 1)));
  show("preemptions", engine.preemptions);
  show("step", engine.steps ? time(engine.step_s) : "–");
}

async function ask() {
  try {
    const answer = await fetch("status", { headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store" });
    byId("lock").hidden = answer.status !== 401;
    if (answer.status === 401) state("locked", false);
    else if (answer.ok) update(await answer.json());
    else state(`the server answers ${answer.status}`, false);
  } catch {
    state("the server cannot be reached", false);
  }
  setTimeout(ask, 1000);
}

byId("lock").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value;
  sessionStorage.setItem("key", key);
});
ask();
