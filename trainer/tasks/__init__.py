"""What is trained on: questions, environments that answer responses, tools, and verifiers that pay.

``Environment`` (``base``) is the contract, ``Task`` its case of one turn. A file ``conf/task/<name>.yaml`` is one, its
``_target_`` names the class: any dataclass that extends either, in this package or not. Nothing here imports torch.
"""

from trainer.tasks.base import Environment, Example, Reply, ResponseInfo, Task
from trainer.tasks.tools import Tool, ToolResult

__all__ = ["Environment", "Example", "Reply", "ResponseInfo", "Task", "Tool", "ToolResult"]
