// The page "PPO in thirty minutes" and the sliders of chapters 1 and 4. What an iteration computes from the numbers in
// response.js is computed anew at every move. A test holds the first five functions against the scripts' own.

// [7.5] The price of the KL for every token; the score comes with the last.
function tokenRewards(score, kl, price) {
  return kl.map((d, t) => (t === kl.length - 1 ? score : 0) - price * d)
}

// [4.3]
function gae(rewards, values, gamma, lam) {
  const deltas = rewards.map((reward, t) => reward + gamma * (values[t + 1] ?? 0) - values[t]), advantages = []
  for (let t = deltas.length - 1, next = 0; t >= 0; t--) advantages[t] = next = deltas[t] + gamma * lam * next
  return {deltas, advantages, returns: advantages.map((advantage, t) => advantage + values[t])}
}

// [4.7] All tokens of the batch -> the function that whitens one of them.
function whitener(numbers) {
  const mean = numbers.reduce((sum, x) => sum + x, 0) / numbers.length
  const variance = numbers.reduce((sum, x) => sum + (x - mean) ** 2, 0) / (numbers.length - 1)
  return x => (x - mean) / Math.sqrt(variance + 1e-8)
}

// [5.3] Also `push`, minus the gradient with respect to the token's log-prob.
function policyLoss(ratio, advantage, low, high) {
  const unclipped = -advantage * ratio, bounded = -advantage * Math.min(Math.max(ratio, 1 - low), 1 + high)
  const clipped = bounded > unclipped
  return {loss: Math.max(unclipped, bounded), clipped, push: clipped ? 0 : advantage * ratio}
}

// [6.4] GRPO's: 0 if all scores of the group are the same.
function groupAdvantages(scores) {
  const mean = scores.reduce((sum, x) => sum + x, 0) / scores.length
  const std = Math.sqrt(scores.reduce((sum, x) => sum + (x - mean) ** 2, 0) / (scores.length - 1))
  return scores.map(score => scores.every(other => other === score) ? 0 : (score - mean) / (std + 1e-6))
}

// Everything about one of the shown responses, given the positions of all sliders.
function iteration(at, values) {
  const shown = response.shown[at.which], scores = [response.batch[shown.row].score, ...shown.group.map(x => x[1])]
  const rows = response.batch.map((row, i) => {
    const rewards = tokenRewards(row.score, row.kl, at.price)
    return {rewards, ...gae(rewards, i === shown.row ? values : row.values, at.gamma, at.lam)}
  })
  const whiten = whitener(rows.flatMap(row => row.advantages)), {kl} = response.batch[shown.row]
  const {rewards, deltas, advantages, returns} = rows[shown.row], whitened = advantages.map(whiten)
  const ratios = at.step ? shown.ratios[at.step - 1] : kl.map(() => 1)
  const group = groupAdvantages(scores.slice(0, at.size)), grouped = kl.map(() => group[0])
  const used = at.source === "group" ? grouped : whitened
  const parts = used.map((advantage, t) => policyLoss(ratios[t], advantage, at.low, at.high))
  const columns = {logprob: shown.logprobs, ref: shown.refs, kl, reward: rewards, value: values, delta: deltas}
  Object.assign(columns, {after: [...values.slice(1), 0], advantage: advantages, return: returns, whitened, grouped})
  Object.assign(columns, {used, ratio: ratios, loss: parts.map(x => x.loss), push: parts.map(x => x.push)})
  return {columns, clipped: parts.map(x => x.clipped), scores, group}
}

const DEFAULTS = {which: 0, price: 0.001, gamma: 1, lam: 0.95, step: 4, low: 0.2, high: 0.2, ratio: 1.3, size: 8,
  source: "critic"}
const PRICES = [0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1]

// Text, and the least, the greatest and the step of a slider.
const KNOBS = {
  price: ["price β", 0, PRICES.length - 1, 1], lam: ["λ", 0, 1, 0.01], gamma: ["γ", 0, 1, 0.01],
  step: ["after step", 0, 16, 1], low: ["clip low", 0, 0.5, 0.01], high: ["clip high", 0, 0.5, 0.01],
  ratio: ["ratio", 0.4, 1.8, 0.01], size: ["group size", 2, 16, 1],
}
// Title, the number that fills a bar, and the number without a bar (NaN: none is drawn).
const COLUMNS = {
  logprob: ["log-prob", NaN], ref: ["reference", NaN], kl: ["d", 1], reward: ["reward", 0.5],
  value: ["V before", NaN], after: ["V after", NaN], delta: ["δ", 0.7], advantage: ["advantage", 0.7],
  return: ["return", NaN], whitened: ["A, whitened", 2.5], grouped: ["A of the group", 2.5], used: ["A", 2.5],
  ratio: ["ratio", 0.4], loss: ["loss", NaN], push: ["push", 2.5],
}
const VIEWS = {
  rewards: ["which price", "logprob ref kl reward"],
  values: ["which", "reward value after delta", "moves values"],
  gae: ["which lam gamma", "value delta advantage return"],
  clip: ["ratio low high", ""],
  ratio: ["which step low high", "whitened ratio loss push"],
  group: ["which size", "whitened grouped"],
  all: ["which price lam gamma step low high size source", "reward value delta advantage return used ratio loss push",
    "moves values"],
}

function shownNumber(x, digits) {
  return x.toFixed(digits).replace(/^-(0\.?0*)$/, "$1").replace("-", "\u2212")
}

function startPage() {
  const at = {...DEFAULTS}, listeners = []
  let values

  function element(parent, name, properties = {}) {
    return parent.appendChild(Object.assign(document.createElement(name), properties))
  }

  function choose(parent, name, text, options) {
    const label = element(parent, "label", {textContent: `${text} `}), select = element(label, "select", {name})
    for (const [value, said] of options) element(select, "option", {value, textContent: said})
    select.addEventListener("change", () => {
      at[name] = name === "which" ? +select.value : select.value
      if (name === "which") restart()
      draw()
    })
    listeners.push(() => { select.value = at[name] })
  }

  function slide(parent, name) {
    const [text, min, max, step] = KNOBS[name], label = element(parent, "label", {textContent: `${text} `})
    const input = element(label, "input", {type: "range", name, min, max, step}), output = element(label, "output")
    input.addEventListener("input", () => {
      at[name] = name === "price" ? PRICES[input.value] : +input.value
      draw()
    })
    listeners.push(() => {
      input.value = name === "price" ? PRICES.indexOf(at.price) : at[name]
      output.value = name === "price" || step === 1 ? at[name] : at[name].toFixed(2)
      input.ariaValueText = output.value
    })
  }

  function restart() {
    values = [...response.batch[response.shown[at.which].row].values]
    for (const place of document.querySelectorAll(".try tbody")) place.replaceChildren()
  }

  function word(token) {
    return token === "<|endoftext|>" ? "EOS" : token.replace("\n", "\\n").replace(" ", "_")
  }

  function fillTable(place, names, moves, {columns, clipped}) {
    response.shown[at.which].words.forEach((token, t) => {
      const row = place.rows[t] ?? place.insertRow()
      if (!row.cells.length) {
        element(element(row, "th", {scope: "row"}), "code", {textContent: word(token)})
        for (const name of names) element(row, "td").dataset.name = name
        if (moves) {
          const cell = row.querySelector("[data-name=value]"), label = `V before ${word(token)}`
          element(cell, "span")
          const input = element(cell, "input", {type: "range", min: 0, max: 1, step: 0.01, ariaLabel: label})
          input.value = values[t]
          input.addEventListener("input", () => {
            values[t] = +input.value
            draw()
          })
        }
      }
      names.forEach((name, k) => {
        const cell = row.cells[k + 1], x = columns[name][t], above = name === "ratio" ? x - 1 : x
        const part = Math.min(1, Math.abs(above) / COLUMNS[name][1]), stopped = clipped[t] && name === "push"
        const place = cell.querySelector("span") ?? cell
        place.textContent = stopped ? "stopped" : shownNumber(x, name === "reward" ? 4 : 2)
        cell.dataset.exact = x
        if (part >= 0) {  // a bar
          cell.style.setProperty("--from", `${above > 0 ? 50 : 50 - 50 * part}%`)
          cell.style.setProperty("--to", `${above > 0 ? 50 + 50 * part : 50}%`)
          cell.style.setProperty("--bar", above > 0 ? "#3d85d9" : "#e08a2c")
        }
        cell.classList.toggle("cut", clipped[t] && ["push", "ratio"].includes(name))
      })
    })
  }

  // The loss of a good and of a bad token over the ratio.
  function drawClip(place) {
    const x = ratio => 10 + 160 * (ratio - 0.4) / 1.4, y = loss => 60 - 26 * loss
    const edges = [0.4, 1 - at.low, 1 + at.high, 1.8]
    place.innerHTML = [1, -1].map(advantage => {
      const line = (low, high) => edges.map(r => `${x(r)},${y(policyLoss(r, advantage, low, high).loss)}`).join(" ")
      const [from, to] = advantage > 0 ? edges.slice(2) : edges.slice(0, 2)
      const {loss, clipped, push} = policyLoss(at.ratio, advantage, at.low, at.high)
      const way = push > 0 ? "up" : "down", size = Math.abs(push).toFixed(2)
      const said = clipped ? "stopped: no gradient" : `pushed ${way} by ${size}`
      const title = advantage > 0 ? "a good token, A = 1" : "a bad token, A = \u22121"
      return `<figure><svg viewBox="0 0 180 122" role="img" aria-label="loss of ${title}, over its ratio">
        <rect x="${x(from)}" y="4" width="${x(to) - x(from)}" height="112" class="flat"/>
        <path d="M10 60H170M${x(1)} 4V116" class="axis"/><text x="${x(1) + 2}" y="114">ratio 1</text>
        <text x="12" y="58">loss 0</text>
        <polyline points="${line(9, 9)}" class="without"/>
        <polyline points="${line(at.low, at.high)}" class="with"/>
        <circle cx="${x(at.ratio)}" cy="${y(loss)}" r="4" class="dot ${clipped ? "clipped" : ""}"/></svg>
        <figcaption><b>${title}</b><br>loss ${shownNumber(loss, 2)}, ${said}</figcaption></figure>`
    }).join("") + "<p>Dashed: the loss without the clip. Grey: no gradient.</p>"
  }

  function fillGroup(place, {scores, group}) {
    const {words, group: others} = response.shown[at.which]
    const texts = [words.filter(token => token !== "<|endoftext|>").join(""), ...others.map(other => other[0])]
    place.replaceChildren()
    group.forEach((advantage, i) => {
      const item = element(place, "li")
      element(item, "code", {textContent: texts[i].trim().replace("\n", " ")})
      const said = ` score ${scores[i]}, A ${shownNumber(advantage, 2)}${i ? "" : " (this one)"}`
      element(item, "span", {textContent: said})
    })
  }

  function draw() {
    const numbers = iteration(at, values)
    for (const listener of listeners) listener(numbers)
  }

  for (const place of document.querySelectorAll(".try")) {
    const [knobs, columns, moves] = VIEWS[place.dataset.view], head = element(place, "div", {className: "knobs"})
    for (const name of knobs.split(" ")) {
      if (name === "which") choose(head, name, "response", response.shown.map(({name}, i) => [i, name]))
      else if (name === "source") choose(head, name, "A from", [["critic", "critic"], ["group", "group"]])
      else slide(head, name)
    }
    element(head, "button", {type: "button", textContent: "reset"}).addEventListener("click", () => {
      Object.assign(at, DEFAULTS, {which: at.which})
      restart()
      draw()
    })
    if (place.dataset.view === "clip") {
      const figures = element(place, "div", {className: "figures"})
      listeners.push(() => drawClip(figures))
      const next = place.nextElementSibling  // the figure of the chapter, which this one replaces
      if (next?.matches("p:has(> img:only-child), p:has(> a > img:only-child)")) next.hidden = true
    }
    if (place.dataset.view === "group") {
      const list = element(place, "ol")
      listeners.push(numbers => fillGroup(list, numbers))
    }
    if (columns) {
      const names = columns.split(" "), box = element(place, "div", {className: "numbers"})
      const table = element(box, "table", {className: "tokens"}), titles = element(element(table, "thead"), "tr")
      const body = element(table, "tbody")
      for (const textContent of ["token", ...names.map(name => COLUMNS[name][0])]) {
        element(titles, "th", {scope: "col", textContent})
      }
      listeners.push(numbers => fillTable(body, names, moves, numbers))
    }
  }
  restart()
  draw()
}

if (globalThis.document) startPage()
