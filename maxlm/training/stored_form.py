"""The interface of a form in which a state holds parameters, other than the weights that are evaluated, exported and read by other runs."""

from typing import Any

from maxlm.models.parameters import Parameters


class StoredForm:
    """A form of parameters in a state and in its checkpoints. A hook that a subclass leaves out changes nothing."""

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> "StoredForm | None":
        """The form that a section asks for; None if it asks for none. Parameters as in `Transform.from_config`; `device_mesh` is None
        for a checkpoint.
        """
        raise NotImplementedError

    def asked(self, entries: Parameters) -> Parameters:
        """Entries of a checkpoint that the wanted `entries` of a state are computed from; leaves have shape, dtype and sharding."""
        return entries

    def restored(self, entries: Parameters) -> Parameters:
        """The wanted entries, from what `asked` named."""
        return entries

    def evaluated(self, params: Parameters, opt_state: Any) -> Parameters:
        """The parameters that are evaluated, from parts of a state."""
        return params
