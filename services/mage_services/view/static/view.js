// Follows a run and listens to the keyboard. Every page is whole without this file.
"use strict";

const LEAST_MS = 1250; // least time between two fetches of the same page
const live = document.getElementById("live");
let isLooking = false, isStale = false, lookedAt = 0, timer = 0;

// Fetch this page again and put in what has changed, without moving what the reader looks at.
async function look() {
  if (document.hidden) return; // `follow` connects again when the page is shown
  if (isLooking) { isStale = true; return; }
  isLooking = true; isStale = false; lookedAt = Date.now();
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of document.querySelectorAll("[data-live]")) {
      const fresh = page.getElementById(part.id);
      if (fresh) replaceChildrenOf(part, fresh);
    }
    document.body.dataset.change = page.body.dataset.change;
  } catch { show("gone", "the server does not answer"); }
  isLooking = false;
  if (isStale) soon();
}

// Replace only the sections whose content has changed: in the others, what the reader has opened or marked stays.
function replaceChildrenOf(old, fresh) {
  const olds = [...old.children], news = [...fresh.children];
  if (olds.length !== news.length) { keepOpen(old, fresh); old.replaceChildren(...news); return; }
  olds.forEach((child, number) => {
    if (child.isEqualNode(news[number]) || child.contains(document.activeElement) && isTyping()) return;
    keepOpen(child, news[number]);
    child.replaceWith(news[number]);
  });
}

function keepOpen(old, fresh) {
  const were = old.querySelectorAll("details");
  fresh.querySelectorAll("details").forEach((part, number) => {
    if (were[number]) part.open = were[number].open;
  });
}

function soon() {
  clearTimeout(timer);
  timer = setTimeout(look, Math.max(0, lookedAt + LEAST_MS - Date.now()));
}

function show(state, title) { live.className = `live ${state}`; live.title = title; }

// A browser opens six connections to a server in all: a hidden page keeps none, or the seventh page would never load.
function follow() {
  let events = null;
  const listen = () => {
    events?.close();
    if (document.hidden) return;
    const { run, change } = document.body.dataset;
    events = new EventSource(`events?run=${encodeURIComponent(run)}&after=${change}`);
    events.onopen = () => show("on", "follows the run");
    events.onmessage = soon;
    events.onerror = () => show("gone", "the server does not answer");
  };
  addEventListener("visibilitychange", listen);
  addEventListener("pagehide", () => events?.close());
  listen();
}

const isTyping = () => /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName ?? "");
const items = () => [...document.querySelectorAll("[data-item]")].filter((item) => item.offsetParent !== null);
const target = (item) => item.matches("a") ? item : item.querySelector("a") ?? item;

function mark(by) {
  const all = items();
  if (!all.length) return;
  const now = all.findIndex((item) => item.contains(document.activeElement));
  const next = all[Math.min(all.length - 1, Math.max(0, now < 0 ? 0 : now + by))];
  target(next).focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest", inline: "nearest" });
}

const go = (selector) => document.querySelector(selector)?.click();
const KEYS = {
  j: () => mark(1), k: () => mark(-1),
  ArrowLeft: () => go("a[rel=prev]"), ArrowRight: () => go("a[rel=next]"),
  ArrowUp: () => go("a[rel=up]"), u: () => go("a[rel=up]"),
  "/": () => (document.querySelector("main input[type=search]") ?? document.querySelector("input[type=search]"))?.focus(),
  "?": () => document.getElementById("help").showModal(),
};

addEventListener("keydown", (event) => {
  if (event.key === "Escape" && isTyping()) document.activeElement.blur();
  const act = KEYS[event.key];
  if (!act || isTyping() || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "ArrowUp" && scrollY > 0) return; // the page scrolls up first
  event.preventDefault();
  act();
});
document.getElementById("keys").addEventListener("click", KEYS["?"]);
document.querySelector(".marked")?.scrollIntoView({ block: "nearest", inline: "center" });
follow();
