"use strict";

const $ = (id) => document.getElementById(id);
const read = (id) => JSON.parse($(id).textContent);

/* Colours: as the system has them, or chosen. */
{
  const button = $("theme");
  const choices = ["auto", "light", "dark"];
  const names = { auto: "as the system has them", light: "light", dark: "dark" };
  let chosen = 0;
  button.hidden = false;
  button.addEventListener("click", () => {
    chosen = (chosen + 1) % choices.length;
    const name = choices[chosen];
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    button.textContent = `◐ ${name}`;
    button.setAttribute("aria-label", `Colours: ${names[name]}`);
  });
}

/* The figures as a file. */
{
  const link = $("data");
  link.href = URL.createObjectURL(new Blob([$("summary").textContent], { type: "application/json" }));
  link.hidden = false;
}

/* Tables that sort by the column clicked on. */
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const text = row.cells[column].textContent.replace(/[▼≠≈%\s]/g, "");
    const figure = Number(text);
    return text !== "" && Number.isFinite(figure) ? figure : text;
  };
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a === "number") return -1;
    if (typeof b === "number") return 1;
    return a.localeCompare(b, undefined, { numeric: true });
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => (down ? -1 : 1) * compare(value(a, column), value(b, column)));
      table.tBodies[0].append(...rows);
    });
  });
}

/* One side of a replay: the groups of tokens that its steps brought, and when each was done. */
class Lane {
  constructor(element, steps) {
    this.clock = element.querySelector("[data-clock]");
    this.page = element.querySelector("pre");
    this.groups = [...element.querySelectorAll("[data-step]")];
    this.done = [];
    this.tokens = [];
    let seconds = 0;
    let tokens = 0;
    for (const [taken, count] of steps) {
      this.done.push((seconds += taken));
      this.tokens.push((tokens += count));
    }
    this.end = seconds;
  }

  /* How many steps were done at a time. */
  at(time) {
    const later = this.done.findIndex((done) => done > time + 1e-9);
    return later < 0 ? this.done.length : later;
  }

  show(time) {
    const steps = this.at(time);
    this.groups.forEach((group, index) => {
      group.classList.toggle("later", index >= steps);
      group.classList.toggle("latest", index === steps - 1 && steps < this.groups.length);
    });
    const tokens = steps ? this.tokens[steps - 1] : 0;
    const finished = steps === this.done.length;
    const state = finished ? `done after ${this.end.toFixed(2)} s` : `${time.toFixed(2)} s`;
    this.clock.textContent = `${count(Math.max(steps - 1, 0), "step")} after prefill, ${count(tokens, "token")}, ${state}`;
    const latest = this.groups[steps - 1];
    if (latest && this.page.scrollHeight > this.page.clientHeight) {
      this.page.scrollTop = finished && time > this.end ? this.page.scrollTop : latest.offsetTop - this.page.clientHeight / 2;
    }
  }
}

const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

class Replay {
  constructor(box, timeline) {
    this.shows = [...box.querySelectorAll("[data-show]")];
    this.timeline = timeline;
    this.lanes = this.shows.map((show, index) =>
      [...show.querySelectorAll(".lane")].map((lane, place) => new Lane(lane, timeline[index].lanes[place])));
    this.playing = false;
    box.querySelector(".controls").hidden = false;
    $("play").addEventListener("click", () => this.toggle());
    $("step").addEventListener("click", () => this.step(1));
    $("back").addEventListener("click", () => this.step(-1));
    $("time").addEventListener("input", () => this.seek((this.end * $("time").value) / 1000));
    $("which")?.addEventListener("change", () => this.choose(Number($("which").value)));
    for (const show of this.shows) show.addEventListener("keydown", (event) => this.key(event));
    this.choose(0);
  }

  get end() {
    return Math.max(...this.lanes[this.chosen].map((lane) => lane.end));
  }

  /* Another answer, shown whole. */
  choose(index) {
    this.pause();
    this.chosen = index;
    this.shows.forEach((show, place) => { show.hidden = place !== index; });
    $("speed").value = String(this.timeline[index].speed);
    this.draw(this.end);
  }

  draw(time) {
    this.time = Math.min(Math.max(time, 0), this.end);
    for (const lane of this.lanes[this.chosen]) lane.show(this.time);
    $("time").value = String(Math.round((1000 * this.time) / this.end));
    $("time").setAttribute("aria-valuetext", `${this.time.toFixed(2)} seconds`);
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  play() {
    if (this.time >= this.end) this.draw(0);
    this.playing = true;
    $("play").textContent = "❚❚ Pause";
    let before = performance.now();
    const frame = (now) => {
      if (!this.playing) return;
      this.draw(this.time + Math.max(0, (now - before) / 1000) * Number($("speed").value));
      before = now;
      if (this.time >= this.end) this.pause();
      else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  pause() {
    this.playing = false;
    $("play").textContent = "▶ Play";
    if (this.chosen !== undefined) this.say();
  }

  seek(time) {
    this.pause();
    this.draw(time);
    this.say();
  }

  /* To the end of the next step, or of the one before, of the first lane; after its last one, of the other. */
  step(way) {
    const times = this.lanes[this.chosen].map((lane) => lane.done);
    const own = times[0];
    const rest = times.slice(1).flat().filter((time) => time > own[own.length - 1]);
    const stops = [0, ...own, ...rest].sort((a, b) => a - b);
    const next = way > 0 ? stops.find((time) => time > this.time + 1e-6) : stops.findLast((time) => time < this.time - 1e-6);
    this.seek(next ?? (way > 0 ? this.end : 0));
  }

  say() {
    $("said").textContent = this.lanes[this.chosen]
      .map((lane) => `${lane.clock.previousElementSibling.textContent.trim()}: ${lane.clock.textContent}`).join(". ");
  }

  key(event) {
    const actions = {
      " ": () => this.toggle(),
      ArrowRight: () => this.step(1),
      ArrowLeft: () => this.step(-1),
      Home: () => this.seek(0),
      End: () => this.seek(this.end),
    };
    if (!(event.key in actions) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }
}

if ($("replay")) new Replay($("replay"), read("timeline"));
