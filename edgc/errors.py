"""What ends a run."""


class StepError(RuntimeError):
    """A step whose result must not reach the weights; the message says why and what to do."""


class ReplicaMismatch(StepError):
    """Processes of one group differ in what they must share; the message says which, in what, and in which step."""


class NonFiniteSum(StepError):
    """A sum of finite gradients is not finite, and nothing else would keep it from the optimizer."""
