"use strict";
// The answer follows the controls: at once by closed forms, and in full when they rest.
(() => {
  const REST = 200, GONE = "memplan ui no longer answers; start it again";
  const token = JSON.parse(document.getElementById("token").textContent);
  const form = document.getElementById("controls"), refused = document.getElementById("refused");
  const later = ["step", "changes", "formulas"];
  let newest = 0, timer = 0, working = false, waiting = false, quick = null;

  const query = () => new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));

  async function ask(path, signal) {
    const answer = await fetch(`${path}?${query()}`, {headers: {"x-memplan-token": token}, cache: "no-store", signal});
    return answer.json();
  }

  // Sections are HTML that the server has made, every text in it escaped; the policy lets no script in it run.
  function place(answer) {
    refused.textContent = answer.refused || "";
    document.body.classList.toggle("outdated", Boolean(answer.refused));
    if (answer.refused) return false;
    document.title = answer.title;
    document.getElementById("title").textContent = answer.title;
    for (const [name, html] of Object.entries(answer.sections)) {
      const made = document.createElement("template");
      made.innerHTML = html;
      const old = document.getElementById(name), opened = [...old.querySelectorAll("details")].map((one) => one.open);
      made.content.querySelectorAll("details").forEach((one, i) => { one.open = Boolean(opened[i]); });
      old.replaceWith(made.content);
    }
    return true;
  }

  async function changed() {
    const mine = ++newest, start = performance.now();
    if (quick) quick.abort();
    quick = new AbortController();
    clearTimeout(timer);
    timer = setTimeout(rested, REST);
    try {
      const answer = await ask("/quick", quick.signal);
      if (mine !== newest) return;
      place(answer);
      later.forEach((name) => document.getElementById(name).classList.add("stale"));
      performance.measure("answer", {start, end: performance.now()});
    } catch (error) {
      if (error.name !== "AbortError") refused.textContent = GONE;
    }
  }

  // One full answer is worked out at a time, and of those asked for meanwhile only the last.
  async function rested() {
    if (working) { waiting = true; return; }
    working = true;
    const mine = newest;
    try {
      for (const path of ["/step", "/full"]) {
        const answer = await ask(path);
        if (mine !== newest || !place(answer)) break;
        window.memplanChart(answer.timeline);
        if (path === "/full") {
          history.replaceState(null, "", `/?token=${token}&${query()}`);
          document.getElementById("said").textContent = ["verdict", "sentence"].map((id) => document.getElementById(id).textContent).join(": ");
          document.body.dataset.full = String(mine);
        }
      }
    } catch (error) {
      refused.textContent = GONE;
    }
    working = false;
    if (waiting) { waiting = false; rested(); }
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", ({target}) => {
    if (target.dataset.powerOf) document.getElementById(target.dataset.powerOf).value = 2 ** target.value;
    const slider = form.querySelector(`[data-power-of="${target.id}"]`);
    if (slider && target.value > 0) slider.value = Math.floor(Math.log2(target.value));
    if (form.checkValidity()) changed();
  });
  rested();
})();
