// Makes the page livelier; everything on it works without this file.
// A changed input fetches its permalink, takes the answer out of that page, and puts the permalink into the address.

const form = document.querySelector("form#ask");
const answer = document.querySelector("#answer");
const status = document.querySelector("#status");
let running = null; // the request under way
let timer = 0;

/** The form's permalink: only what differs from the defaults. */
function permalink() {
  const query = new URLSearchParams();
  for (const [name, value] of new FormData(form)) {
    const field = form.elements.namedItem(name);
    if (value.trim() !== "" && value !== (field.dataset.default ?? "")) query.append(name, value.trim());
  }
  const text = query.toString();
  return text ? `${location.pathname}?${text}` : location.pathname;
}

async function update(link, { remember }) {
  clearTimeout(timer);
  running?.abort();
  const mine = (running = new AbortController());
  answer.setAttribute("aria-busy", "true");
  try {
    const reply = await fetch(link, { signal: mine.signal, headers: { Accept: "text/html" } });
    const page = new DOMParser().parseFromString(await reply.text(), "text/html");
    const fresh = page.querySelector("#answer");
    if (!fresh) throw new Error(`status ${reply.status}`);
    const tab = answer.querySelector("[role=tab][aria-selected=true]")?.dataset.export;
    const open = [...answer.querySelectorAll("details[open]")].map((d) => d.id);
    answer.replaceChildren(...fresh.childNodes);
    for (const id of open) answer.querySelector(`#${CSS.escape(id)}`)?.setAttribute("open", "");
    document.title = page.title;
    enliven(tab);
    status.textContent = answer.querySelector(".says, .problem")?.textContent.replace(/\s+/g, " ").trim() ?? "";
    status.classList.add("hush");
    if (remember) history.pushState(null, "", link);
    else restore(page);
  } catch (error) {
    if (error.name === "AbortError") return;
    status.textContent = "The answer could not be fetched; what is shown is the last one.";
    status.classList.remove("hush");
  } finally {
    if (running === mine) {
      running = null;
      answer.setAttribute("aria-busy", "false");
    }
  }
}

/** Asks again where the form says something else than the address. */
function changed(wait) {
  clearTimeout(timer);
  timer = setTimeout(() => {
    form.elements.model.required = form.elements.config.value.trim() === "";
    const link = permalink();
    if (form.checkValidity() && link !== location.pathname + location.search) update(link, { remember: true });
  }, wait);
}

/** Sets the form to what a fetched page's form says. */
function restore(page) {
  for (const field of page.querySelectorAll("form#ask [name]")) form.elements.namedItem(field.name).value = field.value;
}

/** Copy buttons and tabs in a fresh answer. */
function enliven(chosen) {
  for (const button of answer.querySelectorAll("button[data-copy]")) button.hidden = false;
  const list = answer.querySelector("[data-tabs]");
  if (!list) return;
  const panels = [...list.parentElement.querySelectorAll(".export")];
  const tabs = panels.map((panel) => {
    const tab = document.createElement("button");
    tab.type = "button";
    tab.id = `tab-${panel.id}`;
    tab.dataset.export = panel.id;
    tab.textContent = panel.querySelector("h3").textContent;
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", panel.id);
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-labelledby", tab.id);
    return tab;
  });
  let near = false; // the files are fetched when they come into sight
  new IntersectionObserver((seen, watcher) => {
    if (!seen.some((entry) => entry.isIntersecting)) return;
    watcher.disconnect();
    near = true;
    show(panels.find((panel) => !panel.hidden));
  }, { rootMargin: "400px" }).observe(list);
  const select = (tab) => {
    for (const [i, other] of tabs.entries()) {
      other.setAttribute("aria-selected", String(other === tab));
      other.tabIndex = other === tab ? 0 : -1;
      panels[i].hidden = other !== tab;
    }
    if (near) show(document.getElementById(tab.dataset.export));
  };
  list.setAttribute("role", "tablist");
  list.setAttribute("aria-label", "Configurations");
  list.classList.add("tabs");
  list.parentElement.classList.add("tabbed");
  list.replaceChildren(...tabs);
  select(tabs.find((tab) => tab.dataset.export === chosen) ?? tabs[0]);
  list.addEventListener("click", (event) => event.target.role === "tab" && select(event.target));
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -tabs.indexOf(event.target), End: tabs.length - 1 - tabs.indexOf(event.target) }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = tabs[(tabs.indexOf(event.target) + step + tabs.length) % tabs.length];
    select(next);
    next.focus();
  });
}

/** An export with its text: in the page where it has no address, else fetched from there, once. */
async function show(panel) {
  const link = panel.querySelector("a[download]");
  let text = panel.querySelector("pre");
  if (link && !text) {
    const reply = await fetch(link.href).catch(() => null); // the link stays, whatever comes of it
    if (!reply?.ok || panel.querySelector("pre")) return;
    text = Object.assign(document.createElement("pre"), { textContent: await reply.text(), tabIndex: 0 });
    text.setAttribute("aria-label", panel.querySelector("h3").textContent);
    panel.querySelector("h3").after(Object.assign(document.createElement("div"), { className: "code" }));
    panel.querySelector(".code").append(text);
  }
  if (panel.querySelector("button")) return;
  text.id = `text-${panel.id}`;
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Copy" });
  button.dataset.copy = text.id;
  panel.querySelector(".tools").prepend(button);
}

async function copy(button) {
  const source = document.getElementById(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(source);
    button.textContent = "Selected: press Ctrl+C";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
}

if (form && answer) {
  form.addEventListener("change", () => changed(0));
  form.addEventListener("input", (event) => {
    if (event.target.name !== "config") changed(350); // a configuration is recorded, which takes seconds: once it is whole
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    changed(0);
  });
  answer.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-copy]");
    if (button) copy(button);
  });
  addEventListener("popstate", () => update(location.pathname + location.search, { remember: false }));
  enliven();
}
