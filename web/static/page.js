// Makes the page livelier; everything on it works without this file.
// A changed input fetches its permalink, takes the answer out of that page, and puts the permalink into the address.

const form = document.querySelector("form#ask");
const answer = document.querySelector("#answer");
const status = document.querySelector("#status");
let running = null; // the request under way
let timer = 0;

/** The form's permalink: only what is given. Fields with their defaults are empty. */
function permalink() {
  const query = new URLSearchParams();
  for (const [name, value] of new FormData(form)) {
    if (value.trim() !== "") query.append(name, value.trim());
  }
  const text = query.toString();
  return text ? `${location.pathname}?${text}` : location.pathname;
}

/** Hides an answer that does not match the form, and shows the reason; without a reason, shows the answer. */
function wait(words) {
  answer.setAttribute("aria-busy", String(Boolean(words)));
  status.textContent = words;
  status.classList.toggle("hush", !words);
}

async function update(link, { remember }) {
  clearTimeout(timer);
  running?.abort();
  const mine = (running = new AbortController());
  wait("Computing the answer …");
  try {
    const reply = await fetch(link, { signal: mine.signal, headers: { Accept: "text/html" } });
    const page = new DOMParser().parseFromString(await reply.text(), "text/html");
    const fresh = page.querySelector("#answer");
    if (!fresh) throw new Error(`status ${reply.status}`);
    const tab = answer.querySelector("[role=tab][aria-selected=true]")?.dataset.export;
    const open = [...answer.querySelectorAll("details[open]")].map((d) => d.id);
    answer.replaceChildren(...fresh.childNodes);
    const [ours, theirs] = [document, page].map((d) => d.querySelector("#of-task"));
    if (ours.childElementCount !== theirs.childElementCount) ours.replaceChildren(...theirs.childNodes);
    for (const id of open) answer.querySelector(`#${CSS.escape(id)}`)?.setAttribute("open", "");
    document.title = page.title;
    if (remember) history.pushState(null, "", link);
    else restore(page);
    for (const field of form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
    for (const field of page.querySelectorAll("form#ask [aria-invalid]")) form.elements.namedItem(field.name).setAttribute("aria-invalid", "true");
    wait("");
    status.textContent = answer.querySelector(".says, .problem")?.textContent.replace(/\s+/g, " ").trim() ?? "";
    enliven(tab);
  } catch (error) {
    if (error.name === "AbortError") return;
    wait("The answer could not be fetched. Press Estimate to try again.");
  } finally {
    if (running === mine) running = null;
  }
}

/** Requests a new answer if the form differs from the address; meanwhile the old answer is hidden. */
function changed(delay) {
  clearTimeout(timer);
  const { config, model } = form.elements;
  model.required = config.value.trim() === "";
  const link = permalink();
  const advice = "give files to the command line: fsdp-advisor estimate with --model, --config-file or --peft-config FILE";
  config.setCustomValidity(link.length > config.dataset.longest ? `The form has ${link.length} bytes in an address, too many for the page: ${advice}.` : "");
  if (link === location.pathname + location.search) {
    running?.abort();
    return wait("");
  }
  if (!form.checkValidity()) {
    running?.abort();
    return wait(config.validationMessage || "Complete the form for an answer.");
  }
  wait("Computing the answer …");
  timer = setTimeout(() => update(link, { remember: true }), delay);
}

/** Sets the form to the values of a fetched page's form. */
function restore(page) {
  for (const field of page.querySelectorAll("form#ask [name]")) form.elements.namedItem(field.name).value = field.value;
}

/** Buttons, tabs and the effects of changes in a fresh answer. */
function enliven(chosen) {
  for (const button of answer.querySelectorAll("button[data-copy], button[data-share]")) button.hidden = false;
  explain(answer.querySelector("[data-effects]"));
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

/** An export with its text. The text is in the page if the export has no address, else it is fetched from there once. */
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

/** Shows the effect of each change on the plan, next to its link. */
async function explain(list) {
  if (!list) return;
  const reply = await fetch(list.dataset.effects).catch(() => null); // the links work without
  const effects = reply?.ok ? await reply.json() : {};
  for (const place of list.querySelectorAll("[data-change]")) place.textContent = effects[place.dataset.change] ?? "";
  list.parentElement.querySelector("[data-about]").hidden = !reply?.ok;
}

/** Suggests the models of the catalog; the page itself stays small without their names. */
async function suggest() {
  const list = document.getElementById("known-models");
  const reply = await fetch(list.dataset.from).catch(() => null); // any name can be typed
  const models = reply?.ok ? await reply.json() : [];
  list.replaceChildren(...models.map((model) => new Option("", model.id)));
}

/** Passes the page's address to the device's share sheet, or else to the clipboard. */
async function share(button) {
  if (navigator.share && matchMedia("(pointer: coarse)").matches) return navigator.share({ title: document.title, url: location.href }).catch(() => {});
  await navigator.clipboard.writeText(location.href).then(
    () => (button.textContent = "Address copied"),
    () => (button.textContent = "Copy it from the address bar"),
  );
  setTimeout(() => (button.textContent = "Share"), 2000);
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
  form.elements.model.addEventListener("focus", suggest, { once: true });
  form.addEventListener("change", () => changed(600));
  form.addEventListener("input", (event) => {
    // several fields may be edited in a row, and recording a pasted configuration takes seconds
    changed(event.target.name === "config" ? 2000 : 900);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    update(permalink(), { remember: permalink() !== location.pathname + location.search });
    if (answer.getBoundingClientRect().top > innerHeight / 2) form.querySelector(".go").scrollIntoView();
  });
  answer.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-copy], button[data-share]");
    if (button) "share" in button.dataset ? share(button) : copy(button);
  });
  addEventListener("popstate", () => update(location.pathname + location.search, { remember: false }));
  enliven();
}
