"""The commands that run nothing: levels, plan, why, status, doctor, report; each a view of records and files."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from tasks import invocation
from tasks.errors import UserError
from tasks.files import read_json
from tasks.query import Query, table
from tasks.reason import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tasks.invocation import Invocation
    from tasks.plan import Plan as ChangePlan


def states(now: Invocation) -> dict[str, str]:
    """Return fresh, stale or never for each case; without checkouts nothing is known."""
    found = {}
    for case in now.levels.cases():
        try:
            if now.records.latest("run", case.id) is None:
                found[case.id] = "never"
            else:
                found[case.id] = "fresh" if now.records.find("run", case.id, now.run(case).inputs()) else "stale"
        except UserError:
            found[case.id] = "never"
    return found


class Levels(Query):
    """Show levels, cases and variants."""

    name = "levels"
    doc_purpose = "levels, cases and variants: GPUs, minutes, model, state"

    def answer(self, now: Invocation, words: Sequence[str], *, as_json: bool) -> int:
        """Print one line a case, or JSON with everything levels.yaml says."""
        from tasks import levels, proof

        rows = levels.rows(now.levels, states(now))
        if as_json:
            print(json.dumps(rows, indent=1, default=str))
            return 0
        if now.levels.warnings:
            print(
                f"{len(now.levels.warnings)} remarks on checks that prove little: doit doctor --json", file=sys.stderr
            )
        shown = [
            (
                r["id"] + (" (optional)" if r["optional"] else ""), f"{r['gpus']} GPU", f"{r['minutes']:g} min",
                r["state"], r["model"] or "-", r["title"] or r["level_title"],
            )
            for r in rows
        ]  # fmt: skip
        table([("CASE (NeMo-RL level)", "GPUs", "TIME", "STATE", "MODEL", "TITLE"), *shown], (48, 6, 8, 6, 30))
        for level in now.levels.levels.values():
            if level.includes:
                print(f"{level.id}: {level.title} (asks for {', '.join(level.includes)})")
        print()
        proofs = [(f"proof:{name}", "", title) for name, title in proof.FAMILIES.items()]
        gaps = [(f"proof:{name}", "not possible here", reason) for name, reason in proof.UNPROVED.items()]
        table([("CPU PROOF (no level)", "", ""), *proofs, *gaps], (22, 17))
        return 0


def plan_now(now: Invocation) -> ChangePlan:
    """Return the plan for the difference of the Bridge checkout to `since` (default: merge base with main)."""
    from tasks import plan

    bridge = now.settings.checkout("bridge")
    return plan.plan_for(plan.changed(bridge, now.settings.arguments.get("since")), plan.load_surfaces(), now.levels)


class Plan(Query):
    """Show what the change calls for."""

    name = "plan"
    doc_purpose = "the levels that the difference since=REV calls for, with reasons and GPU minutes"

    def answer(self, now: Invocation, words: Sequence[str], *, as_json: bool) -> int:
        """Print level, cases, cost and why."""
        from dataclasses import asdict

        found = plan_now(now)
        if as_json:
            print(json.dumps(asdict(found), indent=1, default=str))
            return 0
        for note in found.notes:
            print(f"note: {note}")
        if not found.rows:
            print(f"the change calls for no NeMo-RL level ({len(found.ignored)} paths do not reach one)")
        for row in found.rows:
            print(f"{row.level:10} {', '.join(row.cases)}  ({row.gpus} GPUs, {row.gpu_minutes:g} GPU minutes)")
            for reason in row.reasons[:8]:
                print(f"             {reason}")
            if len(row.reasons) > 8:
                print(f"             and {len(row.reasons) - 8} more paths")
        print(f"total: {found.gpu_minutes:g} GPU minutes; doit changed runs it")
        return 0


class Why(Query):
    """Explain staleness and verdict of a task or case."""

    name = "why"
    doc_purpose = "why a task or case is fresh or stale, down to the files, and why its verdict is what it is"
    doc_usage = "NAME [--json]"

    def answer(self, now: Invocation, words: Sequence[str], *, as_json: bool) -> int:
        """Print a chain for each stage of NAME."""
        if not words:
            raise UserError("why what? name a task, a case or a level: doit why level0.grpo_megatron")
        from tasks.why import chain_of, explain, stages_of

        told = [(stage, *explain(now, stage)) for word in words for stage in stages_of(now, word)]
        chains = {s.task: chain_of(now, now.case(s.name)) for s, _, _ in told if s.kind == "check"}
        if as_json:
            print(json.dumps([
                {"task": stage.task, "state": state, "reasons": [r.as_dict() for r in reasons],
                 "chain": [link.as_dict() for link in chains.get(stage.task, [])]}
                for stage, state, reasons in told
            ], indent=1))  # fmt: skip
            return 0
        for stage, state, reasons in told:
            print(f"{stage.task}: {state}")
            for link in chains.get(stage.task, []):
                print(f"    {link.text}")
            for reason in reasons:
                change = f" ({reason.old} -> {reason.new})" if reason.old is not None or reason.new is not None else ""
                print(f"    {reason.text}{change}")
        return 0


class Status(Query):
    """Show what is known and what runs."""

    name = "status"
    doc_purpose = "last verdicts, running attempts, leases"

    def answer(self, now: Invocation, words: Sequence[str], *, as_json: bool) -> int:
        """Print one line a case with a record, and who holds the workspace and the GPUs."""
        rows = []
        for home in sorted((now.workspace.root / "records" / "check").glob("*")):
            # the answer of the last call, which may be an earlier tree's record; the newest where there was none
            known = now.records.history("check", home.name)
            shown = read_json(now.workspace.artefact("check", home.name))
            latest = next((r for r in reversed(known) if r.artefact == shown), known[-1] if known else None)
            if latest is not None:
                steps = latest.artefact.get("steps") or {}
                rows.append({
                    "case": home.name, "verdict": latest.artefact["verdict"], "when": latest.finished,
                    "host": latest.host,
                    "steps": f"{steps.get('reached')}/{steps.get('requested')}",
                    "reason": latest.artefact["reasons"][0]["text"] if latest.artefact["reasons"] else "",
                })  # fmt: skip
        holders = {}
        for what, path in (
            ("workspace", now.workspace.root / "lock"),
            ("gpus", now.settings.build / "leases" / "gpus.lock"),
        ):
            text = path.read_text(encoding="utf-8").strip() if path.exists() else ""
            holders[what] = text or "free"
        busy = holders["workspace"] != "free"
        running = [
            os.fspath(folder) for folder in now.workspace.attempts.glob("*/*")
            if busy and not (folder / "exit.json").exists() and (folder / "spec.json").exists()
        ]  # fmt: skip
        from tasks import inflight

        waiting = inflight.rows(now.workspace.attempts)
        if as_json:
            print(
                json.dumps(
                    {
                        "workspace": now.workspace.name,
                        "cases": rows,
                        "leases": holders,
                        "running": running,
                        "in_flight": waiting,
                    },
                    indent=1,
                )
            )
            return 0
        print(f"workspace {now.workspace.name}: {holders['workspace']}; GPUs: {holders['gpus']}")
        for folder in running:
            print(f"running  {folder}")
        for row in waiting:
            print(f"in flight: job {row['job']}  {row['task']}  {row['state']}, submitted {row['submitted']}")
        table([(r["case"], r["verdict"], r["when"], r["steps"], r["reason"]) for r in rows], (40, 8, 20, 6))
        return 0


class Doctor(Query):
    """Check every precondition."""

    name = "doctor"
    doc_purpose = "every precondition on one page, each finding with a remedy; exit 0 or 2"

    def answer(self, now: Invocation, words: Sequence[str], *, as_json: bool) -> int:
        """Print the findings; any that blocks a level gives 2."""
        from tasks import doctor

        findings = doctor.examine(now)
        if as_json:
            print(json.dumps([f.as_dict() for f in findings], indent=1))
        else:
            for finding in findings:
                mark = {"ok": "ok     ", "note": "note   ", "bad": "BLOCKED"}[finding.state]
                print(
                    f"{mark} {finding.subject:14} {finding.text}"
                    + (f"\n{'':23}-> {finding.remedy}" if finding.remedy else "")
                )
        bad = [f for f in findings if f.state == "bad"]
        if not as_json:
            print(f"Result: {'Blocked' if bad else 'Pass'} - {f'{len(bad)} preconditions missing' if bad else 'ready'}")
        return 2 if bad else 0


class Report(Query):
    """Write the reports again."""

    name = "report"
    doc_purpose = "rewrite the reports of the last call, or from records, running nothing; open=1; compare=A,B"

    def answer(self, now: Invocation, words: Sequence[str], *, as_json: bool) -> int:
        """Render report.json again, or compare two attempts; annotations= prints what CI shows beside the code."""
        from tasks import report
        from tasks.report import notices

        given, page = now.settings.arguments, now.workspace.report / "index.html"
        if "compare" in given:
            page = self._compare(now, given["compare"])
            print(json.dumps({"page": os.fspath(page)}) if as_json else f"Report: {page}")
            self._open(now, page)
            return 0
        service = given.get("annotations")
        if service not in (None, *notices.FORMATS):
            raise UserError(f"annotations={service}: choose {' or '.join(notices.FORMATS)}")
        known = read_json(now.workspace.report / "report.json")
        if not isinstance(known, dict) or "result" not in known:
            from tasks import retell

            known = retell.compose(now)
        report.write(known, now.workspace.root)
        for line in notices.lines(known, service) if service else ():
            print(line)
        if as_json:
            print(json.dumps(known, indent=1))
        else:
            print(f"Result: {known['result']} - {known['sentence']}\nReport: {page}")
        self._open(now, page)
        return invocation.EXIT[Verdict(known["result"])]

    @staticmethod
    def _compare(now: Invocation, words: str) -> Path:
        from tasks.files import write_bytes
        from tasks.report import compare

        page = now.workspace.report / "compare.html"
        write_bytes(page, compare.render(now.workspace, words).encode())
        return page

    @staticmethod
    def _open(now: Invocation, page: Path) -> None:
        if now.settings.arguments.get("open", "0") not in ("0", "false", "no"):
            from tasks.report import serve

            serve.serve(page.parent, page.name)


class Checks(Query):
    """Read the checks out of an upstream script, or compare levels.yaml with the checkout."""

    name = "checks"
    doc_purpose = (
        "`checks import SCRIPT`: a script's own checks as YAML; `checks drift`: levels.yaml against the checkout"
    )
    doc_usage = "import SCRIPT | drift"

    def answer(self, now: Invocation, words: Sequence[str], *, as_json: bool) -> int:
        """Print YAML, or one line a difference; drift gives 1."""
        from pathlib import Path

        from tasks import script_checks

        if len(words) == 2 and words[0] == "import":
            found = script_checks.read_checks(Path(words[1]))
            print(json.dumps(found) if as_json else script_checks.as_yaml(found))
            return 0
        if list(words) != ["drift"]:
            raise UserError("doit checks import SCRIPT, or doit checks drift")
        lines = []
        for case in now.levels.cases():
            script = now.settings.checkout("nemo_rl") / (case.script or "-")
            if script.exists():
                lines += [f"{case.id}: {text}" for text in script_checks.drift(script_checks.as_upstream(case), script)]
        print(json.dumps(lines) if as_json else "\n".join(lines) or "no drift")
        return 1 if lines else 0


class Vendor(Query):
    """Copy the Bridge into NeMo-RL's vendored path, or take it back."""

    name = "vendor"
    doc_purpose = "copy the Bridge under test into NeMo-RL's vendored path; undo=1 takes it back exactly"

    def answer(self, now: Invocation, words: Sequence[str], *, as_json: bool) -> int:
        """Do it and say so."""
        from tasks import vendor

        undone = now.settings.arguments.get("undo", "0") not in ("0", "false", "no")
        sentence = vendor.undo(now) if undone else vendor.vendor(now)
        print(json.dumps({"done": sentence}) if as_json else f"Result: Pass - {sentence}")
        return 0
