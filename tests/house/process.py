"""Changes of the process that a module makes: no attribute of torch or of the interpreter is replaced, not even for a
moment."""

from __future__ import annotations

import ast

#: Functions that change a setting of the whole process.
SETTINGS = {
    "manual_seed_all", "set_default_device", "set_default_dtype", "set_fastpath_enabled",
    "set_float32_matmul_precision", "set_num_threads", "fork_rng", "set_rng_state",
}  # fmt: skip


def replaced(tree: ast.AST) -> list[str]:
    """Assignments and deletions of attributes of torch, of its modules and classes, and of the interpreter."""
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {
                (a.asname or a.name).split(".")[0] for a in node.names if not a.name.startswith("loopq")
            }
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("loopq"):
            foreign |= {a.asname or a.name for a in node.names}

    def root(node: ast.AST) -> str:
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""

    changes = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and root(node) in foreign:
            changes.append(ast.unparse(node))
        setter = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if setter and node.func.id in ("setattr", "delattr") and root(node.args[0]) in foreign:  # type: ignore[attr-defined]
            changes.append(ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in SETTINGS:
            changes.append(ast.unparse(node.func))
    return changes
