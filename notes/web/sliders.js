// The numbers of one response, computed anew at every move of a slider. A test holds gae and policyLoss against
// ppo_llm.py's.
function gae(rewards, values, gamma, lam) {
  const deltas = rewards.map((reward, t) => reward + gamma * (values[t + 1] ?? 0) - values[t]), advantages = []
  for (let t = deltas.length - 1, next = 0; t >= 0; t--) advantages[t] = next = deltas[t] + gamma * lam * next
  return {deltas, advantages, returns: advantages.map((advantage, t) => advantage + values[t])}
}

function policyLoss(ratio, advantage, clip) {
  const unclipped = -advantage * ratio, bounded = -advantage * Math.min(Math.max(ratio, 1 - clip), 1 + clip)
  return {loss: Math.max(unclipped, bounded), clipped: bounded > unclipped}
}

if (globalThis.document) {
  const head = document.querySelector(".sliders"), place = document.querySelector(".numbers")
  const slider = (parent, name, text, max, step, value) => {
    parent.insertAdjacentHTML("beforeend", `<label>${text} <input type="range" name="${name}" min="0" max="${max}"
      step="${step}" value="${value}"> <output></output></label>`)
    const input = parent.lastElementChild.querySelector("input")
    input.addEventListener("input", draw)
    return input
  }
  const gamma = slider(head, "gamma", "discount γ", 1, 0.01, 1), lam = slider(head, "lam", "λ", 1, 0.01, 0.95)
  const clip = slider(head, "clip", "clip ε", 0.5, 0.01, 0.2), step = slider(head, "step", "ratio after step", 4, 1, 4)
  const names = ["token", "reward", "V", "delta", "A", "return", "ratio", "loss"]
  const heads = names.map(name => `<th>${name}</th>`).join("")
  place.innerHTML = `<table><thead><tr>${heads}</tr></thead><tbody></tbody></table>`
  const rows = response.words.map((word, t) => {
    const row = place.querySelector("tbody").insertRow()
    for (const name of names) row.insertCell().dataset.name = name
    row.cells[0].innerHTML = "<code></code>"
    row.cells[0].firstChild.textContent = word === "<|endoftext|>" ? "EOS" : word.replace("\n", "\\n").replace(" ", "_")
    return {cells: row.cells, value: slider(row.cells[2], "value", "", 1, 0.0001, response.values[t])}
  })

  function draw() {
    const values = rows.map(row => +row.value.value)
    const {deltas, advantages, returns} = gae(response.rewards, values, +gamma.value, +lam.value)
    for (const input of document.querySelectorAll("input[type=range]")) {
      input.nextElementSibling.value = (+input.value).toFixed(input.step < 1 ? 2 : 0)
    }
    rows.forEach(({cells}, t) => {
      const ratio = +step.value ? response.ratios[step.value - 1][t] : 1
      const {loss, clipped} = policyLoss(ratio, advantages[t], +clip.value)
      cells[1].textContent = response.rewards[t].toFixed(4)
      for (const [k, x] of [deltas[t], advantages[t], returns[t], ratio, loss].entries()) {
        const cell = cells[k + 3], strength = k === 3 ? (x - 1) / 0.2 : x / 0.7
        cell.dataset.exact = x
        cell.textContent = x.toFixed(2).replace("-0.00", "0.00")
        cell.style.background = `rgb(${strength > 0 ? "31 107 194" : "217 115 13"} / ${Math.min(60, 60 * Math.abs(strength))}%)`
      }
      cells[6].classList.toggle("cut", clipped)
    })
  }
  draw()
}
