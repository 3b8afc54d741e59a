"use strict";
(() => {
  // Colours before anything is painted.
  const themes = ["auto", "light", "dark"];
  const kept = (name, fallback) => {
    try { return localStorage.getItem("headgate:" + name) || fallback; } catch { return fallback; }
  };
  const keep = (name, value) => {
    try { localStorage.setItem("headgate:" + name, value); } catch { /* a private window */ }
  };
  const paint = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  };
  let theme = kept("theme", "auto");
  paint(theme);

  const REFRESH_MS = 15000, DEBOUNCE_MS = 700, FORCE_MS = 2000, POLL_MS = 5000;
  const OPERATION_POLL_MS = 800, OPERATION_MOST_MS = 60000;
  let settings = {};

  const byId = (id) => document.getElementById(id);
  const make = (tag, text, name) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (name) made.className = name;
    return made;
  };
  const counted = (n, word) => n.toLocaleString("en") + " " + word + (n === 1 ? "" : "s");
  // As the pages write it: marks that turn or hide the text around them are spelled out.
  const visible = (text) => text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]/g, (c) => "⟨U+" + c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0") + "⟩");

  function toast(text, tone, link) {
    const box = make("div", visible(text), "toast " + (tone || ""));
    if (link) {
      const a = make("a", " " + visible(link.text));
      a.href = link.href;
      box.append(a);
    }
    byId("toasts").append(box);
    setTimeout(() => box.remove(), tone === "bad" ? 9000 : 4500);
  }

  // Calls. A key for each click: what is sent twice happens once.
  const newKey = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, "0")).join("");
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));

  async function call(method, path, body) {
    // An address with such a part becomes another one before it is sent.
    if (/\/\.{1,2}(?=[/?]|$)/.test(path)) throw new Error("No browser can send the name . or ..; use the command line");
    const options = { method, headers: { Accept: "application/json" }, credentials: "same-origin" };
    if (method !== "GET") {
      options.headers["Idempotency-Key"] = newKey();
      // What is read next has to show what this did, also where others share answers.
      document.cookie = "headgate-acted=1; max-age=3; samesite=strict; path=" + pageUrl("", {}).split("?")[0];
      if (body !== null && body !== undefined) {
        options.headers["Content-Type"] = "application/json";
        options.body = JSON.stringify(body);
      }
    }
    let answer;
    try {
      answer = await fetch(settings.apiBase + path, options);
    } catch {
      await pause(1000); // a connection that broke says nothing: the same key asks again
      answer = await fetch(settings.apiBase + path, options);
    }
    const text = await answer.text();
    let told = null;
    try { told = text ? JSON.parse(text) : null; } catch { /* a proxy in between */ }
    if (!answer.ok) throw new Error((told && told.error) || answer.status + " " + answer.statusText);
    return { told, headers: answer.headers };
  }

  function ask(text, typed) {
    const dialog = byId("ask"), label = byId("ask-typed"), input = label.querySelector("input");
    const yes = dialog.querySelector('[value="yes"]');
    byId("ask-text").textContent = visible(text);
    label.hidden = !typed;
    label.querySelector("code").textContent = visible(typed || "");
    input.value = "";
    // No key types what is spelled out, and a field takes no line break in.
    const accepted = [typed, visible(typed || "").replace(/[\r\n]/g, "")];
    const check = () => { yes.disabled = Boolean(typed) && !accepted.includes(input.value); };
    input.oninput = check;
    check();
    dialog.returnValue = "no";
    dialog.showModal();
    return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true }));
  }

  async function act(given, body, source) {
    if (given.confirm && !(await ask(given.confirm, given.typed))) return;
    if (source) source.disabled = true;
    try {
      const { told, headers } = await call(given.method, given.path, body);
      let text = given.done || "Done";
      const released = headers.get("x-released-jobs"), waiting = headers.get("x-waiting-jobs");
      if (released !== null) text += ": " + counted(Number(released), "job");
      if (waiting !== null) text += ": " + counted(Number(waiting), "waiting job") + (waiting === "1" ? " is" : " are") + " unlimited now";
      if (told && told.sampled_queues !== undefined) text += ": " + told.sampled_queues;
      if (told && told.dropped) text = "A middleware dropped the job";
      const link = told && told.id && !told.dropped && /\/(replay|run)$/.test(given.path) ? { text: told.id, href: pageUrl("job", { id: told.id }) } : null;
      toast(text, "", link);
      if (told && told.operation_id) await follow(told.operation_id);
    } catch (error) {
      toast(error.message, "bad");
    }
    if (source) source.disabled = false;
    refresh();
  }

  const pageUrl = (page, query) => settings.apiBase.replace(/\/api\/v1$/, "/") + page + "?" + new URLSearchParams(query);

  async function follow(id) {
    for (const start = Date.now(); Date.now() - start < OPERATION_MOST_MS; ) {
      const { told } = await call("GET", "/operations/" + encodeURIComponent(id));
      if (told.status === "completed") { toast("Done: " + counted(told.affected, "job")); return; }
      if (told.status === "failed") { toast("Stopped after " + counted(told.affected, "job") + ": " + told.error, "bad"); return; }
      await pause(OPERATION_POLL_MS);
    }
    toast("Still going on; a worker carries it out");
  }

  // Forms: named fields become the body.
  const base64 = (text) => {
    let bytes = "";
    for (const byte of new TextEncoder().encode(text)) bytes += String.fromCharCode(byte);
    return btoa(bytes);
  };
  const readers = {
    int: (v) => Number(v),
    minutes: (v) => Math.round(settings.nowMs + (performance.now() - loadedAt) + Number(v) * 60000),
    base64,
  };
  let loadedAt = performance.now();

  function submit(form) {
    const given = JSON.parse(form.dataset.act);
    const body = { ...given.body };
    let path = given.path, empty = true;
    for (const field of form.querySelectorAll("input, select, textarea")) {
      if (field.dataset.part === "path") { path += encodeURIComponent(field.value); continue; }
      if (!field.name) continue;
      if (field.value === "") { if (field.dataset.empty === "null") body[field.name] = null; continue; }
      empty = false;
      const read = readers[field.dataset.type];
      body[field.name] = read ? read(field.value) : field.value;
      if (typeof body[field.name] === "number" && !Number.isFinite(body[field.name])) { toast(field.name + " is not a number", "bad"); return; }
    }
    const dialog = form.closest("dialog");
    if (dialog) dialog.close();
    document.activeElement?.blur(); // what was typed is sent: the page may show what is stored
    if (empty && given.emptyMethod) act({ ...given, path, method: given.emptyMethod, done: "The limit is lifted" }, null);
    else act({ ...given, path }, body);
  }

  // Bytes that were asked for, as text where they are text.
  function bytesOf(text) { return Uint8Array.from(atob(text), (c) => c.charCodeAt(0)); }
  function textOf(bytes) {
    try { return new TextDecoder("utf-8", { fatal: true }).decode(bytes); } catch { return null; }
  }
  function readable(encoded) {
    if (encoded === null) return "(kept back)";
    const bytes = bytesOf(encoded), text = textOf(bytes);
    if (text === null) {
      const rows = [];
      for (let at = 0; at < Math.min(bytes.length, 4096); at += 16) rows.push(at.toString(16).padStart(6, "0") + "  " + Array.from(bytes.slice(at, at + 16), (b) => b.toString(16).padStart(2, "0")).join(" "));
      return rows.join("\n") + (bytes.length > 4096 ? "\n… " + bytes.length + " bytes" : "");
    }
    try { JSON.parse(text); } catch { return text; }
    return indented(text);
  }
  // Letter by letter: a parser would change long numbers and drop repeated names.
  function indented(text) {
    let made = "", depth = 0, quoted = false;
    const line = () => "\n" + "  ".repeat(depth);
    for (let at = 0; at < text.length; at++) {
      const c = text[at];
      if (quoted) {
        made += c;
        if (c === "\\") made += text[++at];
        else if (c === '"') quoted = false;
      } else if (c === '"') { quoted = true; made += c; }
      else if (c === "{" || c === "[") {
        const rest = /^\s*[}\]]/.exec(text.slice(at + 1, at + 200));
        if (rest) { made += c + rest[0].trim(); at += rest[0].length; }
        else { depth++; made += c + line(); }
      } else if (c === "}" || c === "]") { depth--; made += line() + c; }
      else if (c === ",") made += c + line();
      else if (c === ":") made += ": ";
      else if (!/\s/.test(c)) made += c;
    }
    return made;
  }

  async function show(path) {
    const box = byId("shown");
    box.replaceChildren(make("p", "…", "dim"));
    try {
      const { told } = await call("GET", path);
      const parts = [];
      const add = (name, text) => parts.push(make("p", name, "dim"), make("pre", visible(text)));
      if ("payload" in told) {
        add("payload, schema version " + told.schema_version, readable(told.payload));
        const headers = Object.entries(told.metadata || {});
        if (headers.length) add("headers", headers.map(([k, v]) => k + ": " + v).join("\n"));
      } else {
        add("schema version " + told.schema_version, readable(told.bytes));
      }
      for (const part of parts) if (part.tagName === "PRE") part.dir = "auto";
      box.replaceChildren(...parts);
    } catch (error) {
      box.replaceChildren(make("p", error.message, "dim"));
    }
  }

  async function fill(button) {
    const field = button.form.querySelector("textarea");
    try {
      const { told } = await call("GET", button.dataset.fill);
      const text = told.payload === null ? null : textOf(bytesOf(told.payload));
      if (text === null) toast("The present payload is kept back or is not text", "bad");
      else field.value = text;
    } catch (error) {
      toast(error.message, "bad");
    }
  }

  // Selections on the list of jobs.
  const selected = () => Array.from(document.querySelectorAll('input[name="job"]:checked'), (box) => box.value);
  function count() {
    const shown = byId("selected");
    if (!shown) return;
    const n = selected().length, all = document.querySelectorAll('input[name="job"]').length;
    shown.textContent = n ? n + " selected" : "none selected";
    for (const button of document.querySelectorAll("[data-selection]")) button.disabled = n === 0;
    const every = byId("select-all");
    if (every) { every.checked = n > 0 && n === all; every.indeterminate = n > 0 && n < all; }
  }

  async function selection(action) {
    const ids = selected();
    if (!ids.length || !(await ask(action[0].toUpperCase() + action.slice(1) + " " + counted(ids.length, "job") + "?"))) return;
    try {
      const { told } = await call("POST", "/jobs/actions", { action, ids });
      toast(told.succeeded + " of " + ids.length + " done");
      for (const failed of told.failed.slice(0, 3)) toast(failed.id + ": " + failed.reason, "bad");
      if (told.failed.length > 3) toast("and " + counted(told.failed.length - 3, "more refusal"), "bad");
    } catch (error) {
      toast(error.message, "bad");
    }
    for (const box of document.querySelectorAll('input[name="job"]')) box.checked = false;
    count();
    refresh();
  }

  // Many jobs: how many it would be, then a word for it, then a worker does it.
  async function bulk(given) {
    try {
      const tried = (await call("POST", "/jobs/bulk", { ...given, dry_run: true })).told;
      const most = tried.total_estimated, about = (most >= 50000 ? "≥ " : "") + counted(most, "job");
      const what = Object.entries(given.selector).map(([k, v]) => k + " " + v).join(", ");
      if (!most) { toast("No job with " + what + " is in a state for that"); return; }
      if (!(await ask(given.action[0].toUpperCase() + given.action.slice(1) + " " + about + " with " + what + "? Workers carry it out in batches; jobs that come later are not touched."))) return;
      const { told } = await call("POST", "/jobs/bulk", { ...given, dry_run: false });
      toast("Under way");
      await follow(told.id);
    } catch (error) {
      toast(error.message, "bad");
    }
    refresh();
  }

  // Refreshing: the page is fetched again and only what differs is touched, so that
  // focus, selections, open details and scrolling stay.
  const same = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && (a.nodeType !== 1 || (a.dataset?.key === b.dataset?.key && a.id === b.id));
  const mine = new Set(["open", "checked", "style"]);

  function morph(old, fresh) {
    if (old.nodeType !== 1) { if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue; return; }
    if (old.hasAttribute("data-keep") || old.nodeName === "DIALOG" && old.open) return;
    if (old === document.activeElement && /^(INPUT|TEXTAREA|SELECT)$/.test(old.nodeName)) return;
    for (const { name } of Array.from(old.attributes)) if (!fresh.hasAttribute(name) && !mine.has(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) {
      if (mine.has(name) || old.getAttribute(name) === value) continue;
      old.setAttribute(name, value);
      if (name === "value" && old.nodeName === "INPUT") old.value = value;
    }
    const keyed = new Map();
    for (const child of old.children) if (child.dataset?.key !== undefined) keyed.set(child.nodeName + child.dataset.key, child);
    let place = old.firstChild;
    for (const next of Array.from(fresh.childNodes)) {
      const key = next.nodeType === 1 && next.dataset?.key !== undefined ? next.nodeName + next.dataset.key : null;
      const known = key === null ? undefined : keyed.get(key);
      if (known && known !== place) old.insertBefore(known, place);
      const here = known || (place && key === null && same(place, next) ? place : null);
      if (known) keyed.delete(key);
      if (here) {
        if (here === place) place = place.nextSibling;
        morph(here, next);
      } else {
        old.insertBefore(document.importNode(next, true), place);
      }
    }
    while (place) { const next = place.nextSibling; place.remove(); place = next; }
  }

  let live = kept("live", "on") === "on", fetching = false, again = false, lost = false, timer = null, first = 0, last = performance.now();

  function tell() {
    const button = byId("live");
    button.setAttribute("aria-pressed", String(live));
    button.dataset.state = !live ? "off" : lost ? "lost" : "on";
    byId("live-text").textContent = !live ? "Paused" : lost ? "Lost" : "Live";
  }

  async function refresh() {
    clearTimeout(timer);
    timer = null;
    first = 0;
    if (fetching) { again = true; return; }
    fetching = true;
    try {
      const answer = await fetch(location.href, { credentials: "same-origin", cache: "no-cache" });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const main = page.getElementById("main");
      if (!main) throw new Error("no page");
      const broken = main.dataset.refresh === "error" && answer.status >= 429;
      lost = broken;
      if (!broken || byId("main").dataset.refresh === "error") {
        morph(byId("main"), main);
        const foot = page.getElementById("foot");
        if (foot) morph(byId("foot"), foot);
        settings = JSON.parse(page.getElementById("settings").textContent);
        loadedAt = performance.now();
        count();
      }
    } catch {
      lost = true;
    }
    last = performance.now();
    fetching = false;
    tell();
    if (again) { again = false; refresh(); }
  }

  function hint() {
    if (!live || document.hidden) return;
    const now = performance.now();
    if (!first) first = now;
    clearTimeout(timer);
    timer = setTimeout(refresh, Math.max(0, Math.min(DEBOUNCE_MS, first + FORCE_MS - now)));
  }

  let stream = null, poller = null, seq = null;

  function listen() {
    stop();
    if (!live || document.hidden) return;
    if (settings.streams && window.EventSource) {
      stream = new EventSource(settings.apiBase + "/events");
      stream.addEventListener("queue_activity", hint);
      stream.onerror = () => { if (stream && stream.readyState === EventSource.CLOSED) { stop(); poller = setInterval(poll, POLL_MS); } };
    } else {
      poller = setInterval(poll, POLL_MS);
    }
  }
  function stop() {
    if (stream) stream.close();
    clearInterval(poller);
    stream = poller = null;
  }
  async function poll() {
    try {
      const { told } = await call("GET", "/events/poll" + (seq === null ? "" : "?since=" + seq));
      const known = seq !== null;
      seq = told.seq;
      if (known && told.queues.length) hint();
    } catch { /* the next round asks again, and the page is read every 15 s */ }
  }

  document.addEventListener("click", (event) => {
    const el = event.target.closest("button");
    if (!el || el.disabled) return;
    if (el.dataset.act) { const given = JSON.parse(el.dataset.act); act(given, given.body, el); }
    else if (el.dataset.open) byId(el.dataset.open).showModal();
    else if (el.dataset.close !== undefined) el.closest("dialog").close();
    else if (el.dataset.show) show(el.dataset.show);
    else if (el.dataset.fill) fill(el);
    else if (el.dataset.selection) selection(el.dataset.selection);
    else if (el.dataset.bulk) bulk(JSON.parse(el.dataset.bulk));
    else if (el.id === "theme") {
      theme = themes[(themes.indexOf(theme) + 1) % themes.length];
      keep("theme", theme);
      paint(theme);
      el.textContent = theme[0].toUpperCase() + theme.slice(1);
    } else if (el.id === "live") {
      live = !live;
      keep("live", live ? "on" : "off");
      tell();
      listen();
      if (live) refresh();
    }
  });
  document.addEventListener("submit", (event) => {
    if (!event.target.dataset.act) return;
    event.preventDefault();
    submit(event.target);
  });
  document.addEventListener("change", (event) => {
    if (event.target.id === "select-all") for (const box of document.querySelectorAll('input[name="job"]')) box.checked = event.target.checked;
    count();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.nodeName)) return;
    const search = document.querySelector('input[type="search"]');
    if (search) { event.preventDefault(); search.focus(); }
  });
  document.addEventListener("visibilitychange", () => {
    listen();
    if (!document.hidden && live && performance.now() - last > FORCE_MS) refresh();
  });
  document.addEventListener("DOMContentLoaded", () => {
    settings = JSON.parse(byId("settings").textContent);
    loadedAt = performance.now();
    byId("theme").textContent = theme[0].toUpperCase() + theme.slice(1);
    tell();
    count();
    listen();
    const here = document.querySelector(".top nav [aria-current]"), bar = here?.closest("nav");
    if (here) bar.scrollLeft = here.offsetLeft - bar.offsetLeft - (bar.clientWidth - here.clientWidth) / 2;
    setInterval(() => {
      const most = document.querySelector("[data-fast]") ? FORCE_MS : REFRESH_MS;
      if (live && !document.hidden && performance.now() - last >= most) refresh();
    }, 1000);
  });
  window.addEventListener("pagehide", stop);
  window.addEventListener("pageshow", (event) => { if (event.persisted) { listen(); if (live) refresh(); } });
})();
