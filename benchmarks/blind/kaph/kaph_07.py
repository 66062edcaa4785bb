"""A Decision Transformer on random play: actions in the data are mostly chance, so the loss can fall by a part only.

What counts is the return that it gets when it is asked for a high one.
"""

import os
import tempfile

import torch
from torch import nn
from transformers import DecisionTransformerConfig, DecisionTransformerModel, Trainer, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", "0"))
LENGTH, STATE = 10, 4


def reward_of(state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Best is an action that points against the state's first half and along its second."""
    wish = torch.tanh(state[..., 2:] - state[..., :2])
    return 1.0 - (action - wish).square().mean(-1)


def play(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Players of all skills: a share of the wish, the rest is noise."""
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(count, LENGTH, STATE, generator=g)
    skill = torch.rand(count, 1, 1, generator=g)
    wish = torch.tanh(states[..., 2:] - states[..., :2])
    actions = skill * wish + (1 - skill) * torch.randn(wish.shape, generator=g)
    rewards = reward_of(states, actions)
    to_go = rewards.flip(1).cumsum(1).flip(1).unsqueeze(-1)
    return [{"states": s, "actions": a, "to_go": r} for s, a, r in zip(states, actions, to_go, strict=True)]


class Player(nn.Module):
    """The model and the loss of its actions."""

    def __init__(self) -> None:
        super().__init__()
        config = DecisionTransformerConfig(
            state_dim=STATE, act_dim=2, hidden_size=64, max_ep_len=32, n_layer=2, n_head=4, action_tanh=False
        )
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        self.inner = DecisionTransformerModel(config)

    def act(self, states: torch.Tensor, actions: torch.Tensor, to_go: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(states.shape[1]).expand(states.shape[:2])
        mask = torch.ones(states.shape[:2], dtype=torch.long)
        out = self.inner(
            states=states,
            actions=actions,
            rewards=None,
            returns_to_go=to_go / LENGTH,
            timesteps=steps,
            attention_mask=mask,
        )
        return out.action_preds

    def forward(self, states: torch.Tensor, actions: torch.Tensor, to_go: torch.Tensor) -> dict[str, torch.Tensor]:
        guess = self.act(states, actions, to_go)
        return {"loss": (guess - actions).square().mean(), "guess": guess}


@torch.no_grad()
def regret(model: Player) -> float:
    """What is missing to a perfect mean reward, if the return asked for is the best one."""
    training = model.training
    model.eval()
    states = torch.randn(64, LENGTH, STATE, generator=torch.Generator().manual_seed(31))
    actions, to_go = torch.zeros(64, LENGTH, 2), torch.zeros(64, LENGTH, 1)
    to_go[:, 0] = float(LENGTH)
    total = torch.zeros(64)
    for t in range(LENGTH):
        actions[:, t] = model.act(states[:, : t + 1], actions[:, : t + 1], to_go[:, : t + 1])[:, -1]
        reward = reward_of(states[:, t], actions[:, t])
        total += reward
        if t + 1 < LENGTH:
            to_go[:, t + 1, 0] = to_go[:, t, 0] - reward
    model.train(training)
    return float(1.0 - total.mean() / LENGTH)


def main() -> None:
    set_seed(SEED)
    model = Player()
    ottava.convert(model, "tensorwise_e4m3")
    print(f"first loss {regret(model):.4f}")
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=200,
            per_device_train_batch_size=32,
            learning_rate=2e-3,
            weight_decay=1e-4,
            max_grad_norm=0.25,
            warmup_steps=20,
            lr_scheduler_type="cosine",
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
            seed=SEED,
        )
        Trainer(model, args, train_dataset=play(3200, SEED + 1)).train()
    print(f"final loss {regret(model):.4f}")


if __name__ == "__main__":
    main()
