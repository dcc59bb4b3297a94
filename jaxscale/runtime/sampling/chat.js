"use strict";
const turns = document.getElementById("turns"), note = document.getElementById("note");
const form = document.getElementById("form"), box = document.getElementById("box");
const send = document.getElementById("send"), newChat = document.getElementById("new");
let messages = [], stop = null;

function show(role, text) {
  const turn = document.createElement("div");
  turn.className = "turn " + role;
  turn.textContent = text;
  turns.append(turn);
  toEnd();
  return turn;
}

// The end of the page, and not of the turn: the form lies over what is behind it.
function toEnd() { scrollTo(0, document.documentElement.scrollHeight); }

function atEnd() { return innerHeight + scrollY >= document.documentElement.scrollHeight - 60; }

function writing(on) {
  send.textContent = on ? "Stop" : "Send";
  newChat.disabled = on;
}

async function ask() {
  const turn = show("assistant", "");
  let text = "", rest = "", end = null, began = null;
  stop = new AbortController();
  writing(true);
  note.textContent = "reading";
  try {
    const answer = await fetch("/say", {method: "POST", signal: stop.signal,
      headers: {"Content-Type": "application/json"}, body: JSON.stringify({messages})});
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const {value, done} = await reader.read();
      if (done) break;
      const follow = atEnd();  // who has scrolled up to read stays there
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const told = JSON.parse(line);
        if (began === null) {  // what comes before is the prompt's reading, and compilation
          began = performance.now();
          note.textContent = "writing";
        }
        if ("text" in told) turn.textContent = (text += told.text);
        else end = told;
      }
      if (follow) toEnd();
    }
  } catch (error) {
    end = {error: error.name === "AbortError" ? "stopped" : "the server does not answer"};
  }
  writing(false);
  stop = null;
  if (end && "done" in end) {
    const seconds = (performance.now() - began) / 1000;
    note.textContent = end.tokens + " tokens" +
      (end.tokens > 1 && seconds > 0 ? ", " + ((end.tokens - 1) / seconds).toFixed(1) + " tokens/s" : "") +
      (end.done === "length" ? "; cut at the most tokens" : "");
  } else {
    note.textContent = end ? end.error : "the answer broke off";
  }
  if (text) messages.push({role: "assistant", content: text});
  else {  // as if it had not been sent
    const last = messages.pop();
    box.value = box.value || last.content;
    turn.previousElementSibling.remove();
    turn.remove();
  }
}

form.addEventListener("submit", event => {
  event.preventDefault();
  if (stop) { stop.abort(); return; }
  const text = box.value;
  if (!text.trim()) return;
  box.value = "";
  messages.push({role: "user", content: text});
  show("user", text);
  ask();
});
box.addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
});
newChat.addEventListener("click", () => { messages = []; turns.replaceChildren(); note.textContent = ""; box.focus(); });
box.focus();
