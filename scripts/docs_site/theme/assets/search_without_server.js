// The search of a site that is opened as a file. Browsers start no Worker from a file, so there the worker's script runs in
// a hidden frame: messages to the worker are events of the frame's window, and its postMessage is handed to its owner. As
// with a real one, what arrives is a copy, and arrives later, never within the call that sends it. With a server this does
// nothing.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      this.onmessage = null;
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.src = "about:blank";
      document.documentElement.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data: structuredClone(data) });
        setTimeout(() => {
          if (this.onmessage) this.onmessage(event);
          this.dispatchEvent(event);
        });
      };
      const element = inside.document.createElement("script");
      element.src = new URL(script, location.href).href;
      element.onload = () => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.deliver(data));
      };
      element.onerror = () => {
        const event = new Event("error");
        if (this.onerror) this.onerror(event);
        this.dispatchEvent(event);
      };
      inside.document.body.appendChild(element);
    }

    postMessage(data) {
      const copy = structuredClone(data);
      if (this.waiting) this.waiting.push(copy);
      else setTimeout(() => this.deliver(copy));
    }

    deliver(data) {
      const inside = this.frame.contentWindow;
      if (inside) inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
