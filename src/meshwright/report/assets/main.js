/* Puts the page together: theme, keys, which plan is shown, where the reader is. */
{
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = (name) => { root.dataset.theme = name; };
  theme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
  const flip = () => theme(root.dataset.theme === "dark" ? "light" : "dark");
  document.getElementById("theme").addEventListener("click", flip);

  const choice = document.getElementById("switch");
  const choose = (i) => {
    MW.which = i;
    [...choice.children].forEach((button, n) => button.setAttribute("aria-pressed", String(n === i)));
    MW.render();
  };
  if (MW.data.plans.length > 1) MW.data.names.forEach((name, i) => choice.append(MW.el("button", { type: "button", onclick: () => choose(i) }, name)));
  choose(0);

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const links = [...document.querySelectorAll("nav a")];
    if (event.key === "t") flip();
    else if (event.key === "/" && document.getElementById("tensors")) {
      MW.draw(document.getElementById("tensors"));
      const search = document.getElementById("tensor-search");
      search.scrollIntoView({ block: "center" });
      search.focus();
    } else if (/^[1-9]$/.test(event.key) && links[event.key - 1]) links[event.key - 1].click();
    else return;
    event.preventDefault();
  });

  document.addEventListener("scroll", () => requestAnimationFrame(MW.here), { passive: true });
  addEventListener("beforeprint", () => document.querySelectorAll("section").forEach(MW.draw));
  root.dataset.ready = String(Math.round(performance.now()));
}
