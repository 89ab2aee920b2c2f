"""Environments for environment.patch: a calculator.
Group: sampling, turns, tools

    python benchmarks/tasks.py calculator runs/tasks/calculator && python notes/variants.py apply environment
    accelerate launch environment_llm.py --environment notes/variants/calculator.py:CalculatorInText --reward gsm8k
        --model runs/tasks/calculator/model --dataset runs/tasks/calculator/train.jsonl
        --eval-dataset runs/tasks/calculator/test.jsonl --prompt-suffix "" --max-turns 4
        --max-response-length 96 --lr 1.5e-4 --total-iterations 30

`Calculator` has a tool, for chat models. `CalculatorInText` has a `step`: a turn that ends in <calc>12*7</calc> is told
the result, and any other ends the game (Toolformer, 2302.04761; ReTool, 2504.11536).

Measured: three seeds of that task: greedy rises from 1% to 97-100%, sampled from 13-19% to 93-97%. A response has 1.3
turns at first and 3.0 after 20 iterations, because each problem needs two results.
"""

import ast
import operator
import re
from fractions import Fraction

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value(node, expression):
    if isinstance(node, ast.Constant):
        return Fraction(ast.get_source_segment(expression, node))
    if isinstance(node, ast.UnaryOp):
        return value(node.operand, expression) * (-1 if isinstance(node.op, ast.USub) else 1)
    return OPERATORS[type(node.op)](value(node.left, expression), value(node.right, expression))


class Calculator:
    def reset(self, **row):
        pass

    def calculate(self, expression: str) -> str:
        """Calculate with numbers, brackets and + - * /.

        Args:
            expression: at most 64 characters, such as 12*7
        """
        expression = expression.replace(" ", "")
        if not re.fullmatch(r"[0-9.+\-*/()]{1,64}", expression):
            return "error"
        try:
            result = value(ast.parse(expression, mode="eval").body, expression)
        except (SyntaxError, ValueError, AttributeError, KeyError, ZeroDivisionError):  # 2+, ..., 2(3), 2**3, 2/0
            return "error"
        return str(result) if result.denominator == 1 else f"{float(result):.6g}"


class CalculatorInText(Calculator):
    def step(self, text):
        call = re.search(r"<calc>([^<>]*)</calc>\s*$", text)
        return self.calculate(call[1]) if call else None
