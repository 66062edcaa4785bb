"""Active learning under accelerate: five rounds, each from the same first weights, with twice the labels of the round before."""
import copy
import dataclasses
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", "0"))
set_seed(SEED)
CLASSES, DIM, STEPS = 5, 16, 60
centres = 1.6 * torch.randn(3 * CLASSES, DIM)


def rows(count):
    """Three clusters a class."""
    cluster = torch.randint(3 * CLASSES, (count,))
    return centres[cluster] + torch.randn(count, DIM), cluster % CLASSES


pool, pool_label = rows(4000)
test, test_label = rows(1000)

start = nn.Sequential(
    nn.Linear(DIM, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
)
config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
convert_to_float8_training(start, config=config, module_filter_fn=lambda layer, name: name in ("2", "4"))


@torch.no_grad()
def held_out(model):
    model.eval()
    loss = F.cross_entropy(model(test), test_label).item()
    model.train()
    return loss


def train(accelerator, chosen):
    model = copy.deepcopy(start)  # a fresh start avoids the bias of the first labels
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    loader = DataLoader(TensorDataset(pool[chosen], pool_label[chosen]), batch_size=32, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    done = 0
    while done < STEPS:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            done += 1
            if done == STEPS:
                break
    return model


accelerator = Accelerator(cpu=True)
chosen = torch.randperm(len(pool))[:64]
print("first loss %.4f" % held_out(start))
for round_ in range(5):
    model = train(accelerator, chosen)
    print(f"round {round_}: {len(chosen)} labels, held-out loss {held_out(model):.4f}")
    with torch.no_grad():
        log = F.log_softmax(model(pool), 1)
        unsure = -(log.exp() * log).sum(1)
        unsure[chosen] = -1.0
        half = len(chosen) // 2  # half of the new labels where the net is unsure, half anywhere
        most = unsure.topk(half).indices
        unsure[most] = -1.0
        anywhere = (unsure >= 0).float().multinomial(half)
    chosen = torch.cat([chosen, most, anywhere])
print("final loss %.4f" % held_out(model))
