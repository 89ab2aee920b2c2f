// The pane beside a script: what is said of the lines at the reading line, or the section whose tag was clicked.
{
  const $ = selector => document.querySelector(selector), all = selector => [...document.querySelectorAll(selector)]
  const pane = $(".pane"), body = $(".pane .body"), back = $(".pane .back"), parts = all(".part"), texts = all(".text")
  const edge = element => element.getBoundingClientRect(), wide = matchMedia("(min-width: 60em)")
  let shown, tag // the section in view, the tag that was clicked

  function show(section) {
    if (section === shown) return
    for (const other of all(".pane section")) other.hidden = other !== section
    shown = section
    body.scrollTop = 0
    $(".pane .fold").textContent = section.firstElementChild.textContent
  }
  function follow() {
    const at = Math.max(0, parts.findLastIndex(part => edge(part).top <= innerHeight * 0.2 + 8))
    parts.forEach((part, k) => part.classList.toggle("shown", k === at))
    if (tag && (edge(tag).bottom < 50 || edge(tag).top > innerHeight)) leave()
    if (!tag) show(texts[at])
  }
  function leave() {
    tag?.removeAttribute("aria-current")
    tag = null
    back.hidden = true
  }
  function open(clicked) {
    leave()
    tag = clicked
    tag.setAttribute("aria-current", true)
    back.hidden = false
    show($(`.note[data-note="${tag.textContent}"]`))
  }
  function byAddress() { // a link to a line with a tag asks for its section
    const line = document.getElementById(location.hash.slice(1)), target = line?.querySelector(".tag")
    line?.scrollIntoView()
    if (target) open(target)
  }
  addEventListener("click", event => {
    const clicked = event.target.closest(".script .tag")
    if (clicked && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
      event.preventDefault()
      open(clicked)
      pane.classList.add("open")
      if (!wide.matches && edge(tag).bottom > edge(pane).top) tag.closest(".line").scrollIntoView()
      if (event.detail === 0) pane.focus() // by keyboard
    } else if (event.target.closest(".back")) {
      leave()
      follow()
    } else if (event.target.closest(".fold")) pane.classList.toggle("open")
  })
  pane.addEventListener("keydown", event => {
    if (event.key !== "Escape") return
    pane.classList.remove("open")
    tag?.focus()
    leave()
    follow()
  })
  addEventListener("scroll", () => requestAnimationFrame(follow), {passive: true})
  addEventListener("resize", follow)
  addEventListener("hashchange", byAddress)
  if (!location.hash) document.getElementById($(".beside").dataset.loop).scrollIntoView()
  byAddress()
  follow()
}
