"""Values in Python code that is read and not run. Only literals count: what is computed is not known."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def constants_of(tree: ast.Module) -> dict[str, Any]:
    """The literals that the module assigns to names in capitals."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def calls_of(tree: ast.Module) -> dict[str, list[ast.Call]]:
    """The calls of each name, in the order of their lines. What is imported `as` another name has its own."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    own = {name.asname: name.name for node in imports for name in node.names if name.asname}
    found: dict[str, list[ast.Call]] = {}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        name = ast.unparse(node.func).rsplit(".", 1)[-1]
        found.setdefault(own.get(name, name), []).append(node)
    return found


def variables_of(tree: ast.Module) -> dict[str, Any]:
    """The literals by variable name, for variables that are assigned only once in the whole file.

    They include the defaults of the script's arguments (by attribute, `args.batch_size`) and the fields of the file's own classes (by
    instance, `config.batch_size`). A function's parameter counts as a variable unless a variable has its name; its value is what the call
    passes, or else its default.
    """
    assigned = _known_once(_assignments(tree))
    parameters = _known_once(_defaults_of_parameters(tree))
    names = {name for name, _ in _assignments(tree)}
    found = _defaults_of_arguments(tree) | {name: value for name, value in parameters.items() if name not in names}
    return found | _fields_of_instances(tree) | assigned


def _known_once(pairs: Iterable[tuple[str, ast.expr]]) -> dict[str, Any]:
    """The literals of the names that occur once."""
    known: dict[str, list[Any]] = {}
    for name, value in pairs:
        known.setdefault(name, []).append(literal_of(value, {}))
    return {name: values[0] for name, values in known.items() if len(values) == 1 and values[0] is not None}


def _defaults_of_parameters(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The parameters of functions that have defaults, with what the file's calls give them, or else with the defaults."""
    calls = calls_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            own = node.args
            positional = [*own.posonlyargs, *own.args]
            pairs = [*zip(positional[len(positional) - len(own.defaults) :], own.defaults, strict=True)]
            pairs += [(name, value) for name, value in zip(own.kwonlyargs, own.kw_defaults, strict=True) if value]
            names = [parameter.arg for parameter in positional]
            given = [
                pair
                for call in calls.get(node.name, ())
                if isinstance(call.func, ast.Name)
                for pair in (*zip(names, call.args, strict=False), *((k.arg, k.value) for k in call.keywords))
            ]
            for parameter, default in pairs:
                values = [value for name, value in given if name == parameter.arg]
                yield from ((parameter.arg, value) for value in values or [default])


def _fields_of_instances(tree: ast.Module) -> dict[str, Any]:
    """The fields of the file's classes, such as dataclasses, by `instance.field`, with what the call that makes the instance changes."""
    fields = {
        node.name: _known_once(_assignments(ast.Module(node.body, [])))
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    found: dict[str, Any] = {}
    for name, value in _assignments(tree):
        if isinstance(value, ast.Call) and (of := ast.unparse(value.func)) in fields:
            computed = {keyword.arg for keyword in value.keywords}
            values = {key: each for key, each in fields[of].items() if key not in computed} | keywords_of(value, {})
            found |= {f"{name}.{key}": each for key, each in values.items()}
    return found


def _defaults_of_arguments(tree: ast.Module) -> dict[str, Any]:
    """The defaults that the code gives argparse, by the names of the attributes that have them."""
    calls = calls_of(tree)
    parsed = [name for name, value in _assignments(tree) if ast.unparse(value).endswith(".parse_args()")]
    found: dict[str, Any] = {}
    for call in calls.get("add_argument", ()):
        flags = [
            word.value for word in call.args if isinstance(word, ast.Constant) and str(word.value).startswith("--")
        ]
        default = keywords_of(call, {}).get("default")
        if flags and default is not None:
            found |= {f"{name}.{str(flags[0])[2:].replace('-', '_')}": default for name in parsed}
    return found


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The variables that the file assigns, with what they are assigned; of `a, b = 1, 2` both."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    yield name.id, value


_HAS_BF16 = ("is_bf16_supported", "is_bfloat16_supported", "is_torch_bf16_gpu_available")
"""Functions that return whether the GPU has bf16. They count as true, because every GPU since Ampere has it."""


def literal_of(node: ast.expr, variables: Mapping[str, Any]) -> Any:
    """The value of a literal, of a variable with a literal, or of dict(...); for an attribute such as torch.bfloat16 its text; None for
    others.
    """
    match node:
        case ast.Name(id=name):
            return variables.get(name)
        case ast.Attribute():
            name = ast.unparse(node)
            if name in variables:
                return variables[name]
            return name if name.startswith("torch.") or name[0].isupper() else None  # not args.batch_size
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            pairs = [
                (key.value, literal_of(value, variables))
                for key, value in zip(keys, values, strict=True)
                if isinstance(key, ast.Constant)
            ]
            return {name: value for name, value in pairs if value is not None}
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            parts = [part for side in (left, right) if isinstance(part := literal_of(side, variables), Mapping)]
            return {name: value for part in parts for name, value in part.items()} if parts else None
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = literal_of(operand, variables)
            return None if value is None else not value
        case ast.Call() if ast.unparse(node.func).endswith(_HAS_BF16):
            return True
        case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="torch"), name]):
            dtype = literal_of(name, variables)
            return f"torch.{dtype}" if isinstance(dtype, str) else None
        case ast.Call(func=ast.Name(id="dict"), args=[]):
            return keywords_of(node, variables)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def keywords_of(call: ast.Call, variables: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call whose values are known."""
    return known_keywords(call.keywords, variables)


def known_keywords(keywords: Sequence[ast.keyword], variables: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for keyword in keywords:
        value = literal_of(keyword.value, variables)
        if keyword.arg is None and isinstance(value, Mapping):  # **name
            found |= value
        elif keyword.arg is not None and (value is not None or is_none(keyword.value)):
            found[keyword.arg] = value
    return found


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
