"""What is trained on: questions, their answers, and the verifier that pays for a response.

``Task`` (``base``) is the contract. A file ``conf/task/<name>.yaml`` is a task, its ``_target_`` names the
class: any dataclass that extends ``Task``, in this package or not. Nothing here imports torch.
"""

from trainer.tasks.base import Example, ResponseInfo, Task

__all__ = ["Example", "ResponseInfo", "Task"]
