// Browsers give no workers to pages opened from files: there the search runs in a frame.
if (location.protocol === "file:") window.Worker = class extends EventTarget {
  constructor(url) {
    super()
    const frame = document.body.appendChild(document.createElement("iframe")), inner = frame.contentWindow
    frame.hidden = true
    inner.document.write(`<body><script src="${url}"></script>`)
    inner.document.close()
    inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
    const ready = new Promise(resolve => inner.addEventListener("load", resolve))
    this.postMessage = data => ready.then(() => inner.dispatchEvent(new MessageEvent("message", {data})))
  }
}
// A flag is searched as it is written (lunr takes a dash for "not", and cuts a word at it), a name of verl's without its
// group, and other words than ours as ours.
const ours = {oom: "memory", node: "machines", nodes: "machines", "multi-node": "machines", rewards: "reward", zero: "0"}
const group = /^(?:(?:actor_rollout_ref|actor|critic|rollout|model|algorithm|trainer|data)\.)+(?=\w{3})/
const plain = word => word.replace(group, "").replace(/(\w)-(?=\w)/g, "$1*")
const translate = text => text.replace(/\S+/g, word => ours[word.toLowerCase()]
  ?? (word.startsWith("-") ? word.replace(/^-+(.*)/, "$1 $1^9") : plain(word)))
window.Worker = new Proxy(Worker, {construct(Worker, [url]) {
  const worker = new Worker(url), post = worker.postMessage.bind(worker)
  worker.postMessage = ({type, data}) => post({type, data: typeof data === "string" ? translate(data) : data})
  return worker
}})
