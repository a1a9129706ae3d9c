"""`scripts/bench --gpu`: random weights of real dimensions, in bf16 and 4 bit, beside peers on the same device.

For each size and format: what forwards cost by width, a pipelined step, prefill, drafting simulated at a known acceptance
(`lookahead-runner --measure`), and decoding as a host sees it, through the runner's pipes. Needs no file from elsewhere.
"""
import json
import statistics
import subprocess
import sys

import bench

PREFILL = 4096
CHUNK = "2048"
BITS = {"bf16": [], "4bit": ["--bits", "4"]}


def checkpoint(directory, size, form):
    """A checkpoint of these dimensions, made unless it is there."""
    path = directory / f"{size}-{form}"
    if not (path / "config.json").exists():
        print(f"making {path.name} ...", file=sys.stderr, flush=True)
        maker = bench.HERE / "scripts/random-checkpoint"
        subprocess.run([sys.executable, maker, path, "--size", size, *BITS[form]], check=True)
    return path


def through_pipes(model, runs):
    """Tokens per second of plain decoding as a host sees it."""
    runner = bench.Runner(model, flags=("--cache-device", "0", "--draft", "off", "--chunk", CHUNK))
    prompt = list(range(20, 148))
    runner.decode(prompt, 64)
    rates = [runner.decode(prompt, 256)[0] for _ in range(runs)]
    runner.close()
    return rates


def peer_figures(name, model, runs):
    peer = bench.Peer(name, model)
    prompt = list(range(20, 148))
    peer.ask("decode", prompt, 8)
    # A peer may need many seconds for a prompt of this length: one run, after one that compiles.
    prefill = [peer.ask("prefill", [i * 7919 % 4000 for i in range(PREFILL)]) for _ in range(2)][-1]
    rates = [peer.ask("decode", prompt, 64) for _ in range(runs)]
    peer.close()
    return {"decode": statistics.median(rates), "prefill": prefill}


def measure(model):
    command = [bench.RUNNER, "--model", model, "--chunk", CHUNK, "--measure"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def run(args, names):
    if args.runner:
        bench.RUNNER = args.runner.resolve()
    rows = []
    for size in args.sizes.split(","):
        for form in args.formats.split(","):
            model = checkpoint(args.models, size, form)
            row = {"model": model.name, "measured": measure(model), "pipes": through_pipes(model, args.runs),
                   "peers": {name: peer_figures(name, model, args.runs) for name in names}}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
    table = "\n".join(lines(row, args) for row in rows)
    print(table)
    if args.markdown:
        args.markdown.write_text(table + "\n")


def lines(row, args):
    measured = row["measured"]
    pace, pipes = 1e3 / measured["pipelined_step"], statistics.median(row["pipes"])
    widths = measured["widths"]
    out = [f"### {row['model']}, {measured['backend']}", "",
           f"- a pipelined step {measured['pipelined_step']:.2f} ms ({pace:.0f} tokens/s), {measured['operations']} operations",
           f"- through the pipes, 256 tokens, median of {args.runs}: {pipes:.0f} tokens/s, {pipes / pace:.2f} of that pace",
           f"- prefill of {measured['prefill_tokens']} tokens: {measured['prefill_rate']:,.0f} tokens/s"]
    out += [f"- drafting {s['depth']} deep, right with probability {s['right']} (simulated): {s['speedup']:.2f} of plain decoding"
            for s in measured["simulated"]]
    for name, figures in row["peers"].items():
        out.append(f"- {name}: {figures['decode']:.0f} tokens/s (ours {pipes / figures['decode']:.1f}x), prefill "
                   f"{figures['prefill']:,.0f} tokens/s (ours {measured['prefill_rate'] / figures['prefill']:.0f}x)")
    return "\n".join([*out, "", "| rows | " + " | ".join(str(w["rows"]) for w in widths) + " |", "|---|" + "---|" * len(widths),
                      "| milliseconds | " + " | ".join(f"{w['milliseconds']:.2f}" for w in widths) + " |",
                      "| of one row | " + " | ".join(f"{w['milliseconds'] / widths[0]['milliseconds']:.2f}" for w in widths)
                      + " |", ""])
