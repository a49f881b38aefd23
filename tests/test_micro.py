"""The shared micro models: each is made once, and its run is a whole run."""

from micro import micro_model


def test_a_folder_is_made_once(micro_folders):
    first = micro_folders.model("mdlm")
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert micro_folders.model("mdlm") == first and (first / "model.safetensors").stat().st_mtime_ns == written


def test_runs_and_models_hold_what_was_asked_for(micro_folders):
    run = micro_folders.run("ar", train__steps=4)
    assert (run / "checkpoints" / "step-00000004").is_dir()
    assert micro_model("ar", model__depth=2).config.model.depth == 2
