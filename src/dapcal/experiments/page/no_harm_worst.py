"""Why the worst case of each column of the no-harm benchmark is as it is: found by looking into it, one by one.

A test asks for a sentence where the worst case is worse at all, so a new run with other worst cases needs new ones.
"""

from __future__ import annotations

WHY = {  # (column, case): a sentence
    ("accuracy", "digits: MC dropout"): "The draws were pulled towards the network that they are spread around, since "
    "it predicted held-out rows better; a few labels change with that, less than one of 449 test rows on average.",
    ("rmse", "concrete: VI"): "With one of five seeds held-out rows found the network 0.01 nats ahead of its draws, so "
    "these were pulled half of the way towards it, and their mean moved with them.",
    ("nll", "digits without 8 and 9: one network"): "Eight classes are easy, and almost no held-out row is wrong; the "
    "guard then allows its whole tolerance of 0.01 nats, and test rows cost within one standard error of it.",
    (
        "ece",
        "mnist: VI",
    ): "Distance only ever lowers confidence, and 93 % of these rows are right; the NLL falls all the same.",
    ("coverage", "concrete: VI"): "Over all seeds intervals hold 95.3 % after and 95.4 % before; in four they hold one "
    "to four rows of 258 more, and in one, where held-out rows had lowered the noise level, fifteen fewer.",
    ("auroc", "mnist: MC dropout (omniglot)"): "Two of five seeds gain and three lose, each by one point at most; the "
    "mean is a small part of its standard error.",
    ("auroc", "sinusoid: ensemble (between the clusters)"): "Both are 99.9; nothing is left to gain.",
    (
        "fpr95",
        "energy: ensemble (two columns exchanged)",
    ): "Energy's columns have few values. In about a tenth of these "
    "rows both columns have nearly the same standardised value, so that nothing is changed by exchanging them; finding "
    "95 % of them means flagging ordinary rows, before as after. The AUROC of these rows rises.",
    ("gap nll", "wine gap: table ensemble (the gap)"): "A difference of a third of its standard error.",
}
