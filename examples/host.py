#!/usr/bin/env python3
"""A host for Lookahead in a hundred lines: one scheduler, several answers at once, cancellation.

    python3 examples/host.py [--program target/release/lookahead] MODEL PROMPT...

Each prompt is a request of its own; answers arrive interleaved and are printed whole. Press Ctrl-C to cancel what is left.
The same program speaks with a runner directly: start `lookahead-runner --model MODEL` and leave `model` out.
"""

import argparse
import json
import queue
import subprocess
import sys
import threading


class Host:
    """A scheduler process: `send` writes a request, `events` gives what it says, in order."""

    def __init__(self, command):
        # stderr is the program's log and stays ours; a pipe that nobody reads would fill up.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.queue = queue.Queue()
        # Reading never waits for writing: with both in one thread two full pipes would stop each other.
        threading.Thread(target=self._read, daemon=True).start()
        hello = self.next_event()
        if hello["type"] != "hello" or hello["protocol"]["major"] != 1:
            raise RuntimeError(f"unknown protocol: {hello}")

    def _read(self):
        for line in self.process.stdout:
            if line.strip():
                self.queue.put(json.loads(line))
        self.queue.put(None)

    def send(self, request):
        line = json.dumps(request) + "\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()

    def next_event(self):
        event = self.queue.get()
        if event is None:
            raise RuntimeError(f"the scheduler ended with status {self.process.wait()}")
        return event

    def close(self):
        # The end of stdin means that the host is gone: what runs is cancelled, all models are unloaded.
        self.process.stdin.close()
        return self.process.wait()


def answer_all(host, model, prompts):
    """Asks all prompts at once and returns the answers as (text, final event), in the order of the prompts."""
    texts = {str(number): [] for number in range(len(prompts))}
    ends = {}
    for number, prompt in enumerate(prompts):
        messages = [{"role": "user", "content": prompt}]
        host.send({"type": "generate", "id": str(number), "model": model, "messages": messages,
                   "options": {"temperature": 0, "num_predict": 256}})
    while len(ends) < len(prompts):
        try:
            event = host.next_event()
        except KeyboardInterrupt:
            for number in texts.keys() - ends.keys():
                host.send({"type": "cancel", "id": f"cancel {number}", "target": number})
            continue
        # Unknown types and fields are to be ignored: minor versions of the protocol add some.
        kind, number = event["type"], event.get("id")
        if kind == "load":
            print(f"loading {event['model']}: {event['done']} of {event['total']}", file=sys.stderr)
        elif kind == "token" and number in texts:
            texts[number].append(event["text"])
        elif kind in ("done", "error") and number in texts:
            ends[number] = event
    return [("".join(texts[str(number)]), ends[str(number)]) for number in range(len(prompts))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default="lookahead", help="the scheduler's executable")
    parser.add_argument("model")
    parser.add_argument("prompts", nargs="+")
    arguments = parser.parse_args()

    host = Host([arguments.program, "serve"])
    failed = False
    for text, end in answer_all(host, arguments.model, arguments.prompts):
        print(text.strip())
        if end["type"] == "error":
            failed = True
            print(f"{end['code']}: {end['message']} (worth a retry: {end['retryable']})", file=sys.stderr)
        else:
            print(f"[{end['eval_count']} tokens, {end['done_reason']}]", file=sys.stderr)
    return 1 if host.close() or failed else 0


if __name__ == "__main__":
    sys.exit(main())
