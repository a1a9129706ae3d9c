#!/usr/bin/env python3
"""Measures decode and prefill of Lookahead and its peers on the same weights, in turns, medians of several runs.

    scripts/bench                           the bundled model, beside mlx-lm
    scripts/bench --peers mlx-lm,transformers,llama-server
    scripts/bench --model DIR --runs 5 --json out.json --markdown out.md
    scripts/bench --gpu --sizes 4B --formats bf16,4bit     random weights of real dimensions, made on the spot

mlx-lm and transformers are installed into .lookahead/bench-venv when asked for (transformers brings torch, several
hundred MB). llama-server is taken from --llama-server or the PATH and needs --gguf.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent.parent
BUNDLED = HERE / "fixtures/models/tiny-qwen3.5-mtp"
RUNNER = HERE / "target/release/lookahead-runner"
PINS = {"mlx-lm": ["mlx-lm==0.32.2", "mlx[cpu]==0.32.2"], "transformers": ["transformers==5.24.0", "torch", "safetensors"]}
PROMPTS = {
    "code": "def __init__(self, name, value=None):\n        self.name = name\n",
    "counting": "<|im_start|>user\nCount from 12 to 60.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "prose": "And it came to pass in those days, that there went out a",
}


def install(package):
    marker = HERE / ".lookahead/bench-venv" / f".installed-{package}"
    present = importlib.util.find_spec({"mlx-lm": "mlx_lm"}.get(package, package)) is not None
    if not present and not marker.exists():
        print(f"installing {package} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *PINS[package]], check=True)
        marker.touch()


class Runner:
    """Our runner, driven over its pipes."""

    def __init__(self, model, flags=("--cache-device", "0")):
        self.process = subprocess.Popen(
            [RUNNER, "--model", model, *flags],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.count = 0
        self.until(lambda event: event["type"] in ("ready", "error"))

    def until(self, wanted):
        for line in self.process.stdout:
            event = json.loads(line)
            if wanted(event):
                return event
        raise SystemExit("the runner ended")

    def generate(self, tokens, count, **more):
        self.count += 1
        name = f"r{self.count}"
        request = {"type": "generate", "id": name, "tokens": tokens, "cache": False,
                   "options": {"temperature": 0, "num_predict": count, "ignore_eos": True}, **more}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        done = self.until(lambda event: event.get("id") == name and event["type"] in ("done", "error"))
        if done["type"] == "error":
            raise SystemExit(done["message"])
        return done

    def tokenize(self, text):
        self.count += 1
        name = f"t{self.count}"
        self.process.stdin.write(json.dumps({"type": "tokenize", "id": name, "text": text}) + "\n")
        self.process.stdin.flush()
        return self.until(lambda event: event.get("id") == name)["tokens"]

    def decode(self, tokens, count, **more):
        """Tokens per second of generation, the whole decode phase."""
        done = self.generate(tokens, count, **more)
        return done["eval_count"] / (done["eval_duration"] / 1e9), done

    def prefill(self, tokens):
        done = self.generate(tokens, 0)
        return (len(tokens) - 1) / (done["prompt_eval_duration"] / 1e9)

    def first_token(self, tokens):
        """Milliseconds from the request to its first token, the prefix cache in use."""
        self.count += 1
        name = f"f{self.count}"
        request = {"type": "generate", "id": name, "tokens": tokens, "options": {"temperature": 0, "num_predict": 4,
                                                                                 "ignore_eos": True}}
        start = time.perf_counter()
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        self.until(lambda event: event.get("id") == name and event["type"] in ("token", "error"))
        elapsed = time.perf_counter() - start
        self.until(lambda event: event.get("id") == name and event["type"] in ("done", "error"))
        return elapsed * 1e3

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def first_tokens(model, tokens, runs):
    """Time to first token of a prompt never seen, and of the same prompt again; medians."""
    runner = Runner(model, flags=("--draft", "off"))
    runner.first_token(tokens[: len(tokens) // 2])
    cold, warm = [], []
    for run in range(runs):
        prompt = [tokens[run + 1], *tokens[1:]]
        cold.append(runner.first_token(prompt))
        warm.append(runner.first_token(prompt))
    runner.close()
    return {"cold": statistics.median(cold), "warm": statistics.median(warm)}


def widths(model):
    """What forwards of several widths cost."""
    output = subprocess.run([RUNNER, "--model", model, "--measure"], check=True, capture_output=True, text=True).stdout
    return json.loads(output)


PEER = r"""
import json, sys, time
kind, model = sys.argv[1], sys.argv[2]
if kind == "mlx-lm":
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.models.cache import make_prompt_cache
    net, _ = load(model)
    def decode(ids, count):
        cache = make_prompt_cache(net)
        token = mx.argmax(net(mx.array([ids]), cache=cache)[:, -1], axis=-1)
        mx.eval(token)
        start = time.perf_counter()
        for _ in range(count):
            following = mx.argmax(net(token[None], cache=cache)[:, -1], axis=-1)
            mx.async_eval(following)
            token.item()
            token = following
        mx.eval(token)
        return count / (time.perf_counter() - start)
    def prefill(ids):
        cache = make_prompt_cache(net)
        start = time.perf_counter()
        mx.eval(net(mx.array([ids]), cache=cache)[:, -1])
        return len(ids) / (time.perf_counter() - start)
else:
    import torch
    from transformers import AutoModelForImageTextToText, AutoModelForCausalLM
    torch.set_grad_enabled(False)
    try:
        net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    except ValueError:
        net = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    net.eval()
    def decode(ids, count):
        out = net(torch.tensor([ids]), use_cache=True)
        start = time.perf_counter()
        for _ in range(count):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            out = net(token, past_key_values=out.past_key_values, use_cache=True)
        return count / (time.perf_counter() - start)
    def prefill(ids):
        start = time.perf_counter()
        net(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        return len(ids) / (time.perf_counter() - start)
print("ready", flush=True)
for line in sys.stdin:
    what, ids, count = json.loads(line)
    print(decode(ids, count) if what == "decode" else prefill(ids), flush=True)
"""


class Peer:
    """A Python peer in a process of its own, so that each measurement has the machine to itself."""

    def __init__(self, kind, model):
        self.process = subprocess.Popen([sys.executable, "-c", PEER, kind, str(model)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        while True:
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit(f"{kind} did not start")
            if line.strip() == "ready":
                break

    def ask(self, what, ids, count=0):
        self.process.stdin.write(json.dumps([what, ids, count]) + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class LlamaServer:
    """llama-server on a port of its own, plain decoding."""

    def __init__(self, program, gguf):
        self.port = 18000 + os.getpid() % 2000
        self.process = subprocess.Popen(
            [program, "-m", gguf, "--port", str(self.port), "--host", "127.0.0.1", "-np", "1", "--no-webui", "-t", "2"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1)
                return
            except OSError:
                time.sleep(0.1)
        raise SystemExit("llama-server did not start")

    def ask(self, what, ids, count=0):
        body = {"prompt": ids, "n_predict": count or 1, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/completion", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        timings = json.load(urllib.request.urlopen(request, timeout=600))["timings"]
        return timings["predicted_per_second" if what == "decode" else "prompt_per_second"]

    def close(self):
        self.process.terminate()
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=BUNDLED)
    parser.add_argument("--peers", default="mlx-lm")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--llama-server")
    parser.add_argument("--gguf")
    parser.add_argument("--runner", type=pathlib.Path, help="a runner built elsewhere")
    parser.add_argument("--gpu", action="store_true", help="random weights of real dimensions; see --sizes and --formats")
    parser.add_argument("--sizes", default="0.8B,4B,9B", help="what scripts/random-checkpoint knows")
    parser.add_argument("--formats", default="bf16,4bit")
    parser.add_argument("--models", type=pathlib.Path, default=HERE / ".lookahead/bench-models",
                        help="where random checkpoints are made and kept")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    args = parser.parse_args()
    names = [name for name in args.peers.split(",") if name]
    for name in names:
        if name in PINS:
            install(name)
    if args.gpu:
        import bench_gpu
        bench_gpu.run(args, names)
        return
    if args.runner:
        global RUNNER
        RUNNER = args.runner.resolve()
    runner = Runner(args.model)
    short = (runner.tokenize(PROMPTS["code"]) * 4)[:20]
    long = (runner.tokenize("".join(PROMPTS.values())) * 200)[:args.prompt]
    peers = {}
    for name in names:
        if name == "llama-server":
            program = args.llama_server or shutil.which("llama-server")
            if not program or not args.gguf:
                raise SystemExit("llama-server needs --llama-server (or the PATH) and --gguf")
            peers[name] = LlamaServer(program, args.gguf)
        else:
            peers[name] = Peer(name, args.model)
    figures = {"decode": {"lookahead": []}, "prefill": {"lookahead": []}}
    off = {"draft": {"mode": "off"}}
    runner.decode(short, 32, **off)
    runner.prefill(long)
    for name, peer in peers.items():
        peer.ask("decode", short, 8)
    for _ in range(args.runs):
        figures["decode"]["lookahead"].append(runner.decode(short, args.tokens, **off)[0])
        figures["prefill"]["lookahead"].append(runner.prefill(long))
        for name, peer in peers.items():
            figures["decode"].setdefault(name, []).append(peer.ask("decode", short, args.tokens))
            figures["prefill"].setdefault(name, []).append(peer.ask("prefill", long))
    drafting = {}
    for kind, text in PROMPTS.items():
        ids = runner.tokenize(text)
        runner.decode(ids, 256)
        ratios, rates, last = [], [], None
        for _ in range(args.runs):
            plain, _ = runner.decode(ids, 256, **off)
            rate, last = runner.decode(ids, 256)
            ratios.append(rate / plain)
            rates.append(rate)
        draft = last["draft"]
        drafting[kind] = {
            "tokens_per_second": statistics.median(rates),
            "ratio_to_plain": statistics.median(ratios),
            "accepted_per_tested": draft["accepted"] / max(1, draft["tested"]),
            "depth": draft["depth"],
        }
    runner.close()
    for peer in peers.values():
        peer.close()
    report(args, figures, drafting, first_tokens(args.model, long, args.runs), widths(args.model))


def report(args, figures, drafting, first, measured):
    lines = ["| tokens/s (median of %d) | %s |" % (args.runs, " | ".join(figures["decode"])),
             "|---|" + "---|" * len(figures["decode"])]
    medians = {what: {name: statistics.median(values) for name, values in rows.items()} for what, rows in figures.items()}
    for what, label in (("decode", f"decode, 20-token prompt, {args.tokens} tokens, plain"),
                        ("prefill", f"prefill of {args.prompt} tokens")):
        cells = []
        for name, value in medians[what].items():
            ratio = medians[what]["lookahead"] / value
            cells.append(f"{value:,.0f}" + ("" if name == "lookahead" else f" ({ratio:.1f}x slower)" if ratio >= 1
                                            else f" ({1 / ratio:.2f}x faster)"))
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += ["", "| drafting, greedy, 256 tokens | tokens/s | to plain, same run | accepted of tested | depth histogram |",
              "|---|---|---|---|---|"]
    for kind, row in drafting.items():
        depth = " ".join(f"{k}:{v}" for k, v in row["depth"].items())
        lines.append(f"| {kind} | {row['tokens_per_second']:,.0f} | {row['ratio_to_plain']:.2f} | "
                     f"{row['accepted_per_tested']:.2f} | {depth} |")
    lines += ["", f"Time to first token, {args.prompt} tokens: {first['cold']:.1f} ms never seen, {first['warm']:.1f} ms seen before.",
              "", "| rows of a forward | " + " | ".join(str(row["rows"]) for row in measured["widths"]) + " |",
              "|---|" + "---|" * len(measured["widths"]),
              "| milliseconds | " + " | ".join(f"{row['milliseconds']:.2f}" for row in measured["widths"]) + " |",
              "", f"A pipelined step takes {measured['pipelined_step']:.2f} ms; its graph has {measured['operations']} operations."]
    table = "\n".join(lines)
    print(table)
    if args.json:
        args.json.write_text(json.dumps({"figures": figures, "medians": medians, "drafting": drafting, "first_token_ms": first,
                                         "measured": measured}, indent=1))
    if args.markdown:
        args.markdown.write_text(table + "\n")


if __name__ == "__main__":
    main()
