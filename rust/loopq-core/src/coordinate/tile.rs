//! One tile of rows through all stages.

use crate::coordinate::{Problem, Solution};
use crate::lanes::{columns_of, Lane, LANES};
use crate::weight::Weight;
use crate::{Execution, Result};

/// Relative gain of a round below which a row is done.
const SETTLED: f64 = 1e-6;

/// A tile's solution and how it was found.
pub(super) struct Solved {
    pub(super) solution: Solution,
    pub(super) course: Course,
}

/// The loss of each row after each stage, and what it took.
pub(super) struct Course {
    pub(super) stages: [Lane; 4],
    pub(super) moves: u64,
    pub(super) rounds: usize,
}

/// A solution with its gradient and the loss of each row.
struct State {
    solution: Solution,
    gradient: Vec<Lane>,
    loss: Lane,
    done: [bool; LANES],
}

impl Problem<'_> {
    /// Solves the rows of a weight from `first` on.
    pub(super) fn solve_tile(
        &self,
        w: Weight<'_>,
        first: usize,
        execution: &Execution<'_>,
    ) -> Result<Solved> {
        let lanes = columns_of(w, first);
        let solution = self.sweep(&lanes, self.fit(&lanes, first)?);
        let (gradient, loss) = self.gradient(&lanes, &solution.values);
        let mut state = State { solution, gradient, loss, done: [false; LANES] };
        let mut stages = [loss; 4];
        let (mut moves, mut rounds) = (0, 0);
        while rounds < self.settings.rounds && state.done.contains(&false) {
            execution.check()?;
            let before = state.loss;
            let mut next = state.solution.clone();
            moves += self.descend(&mut next, state.gradient.clone(), self.settings.sweeps);
            self.take(&lanes, &mut state, next);
            let descended = state.loss;
            let mut refitted = state.loss;
            if self.settings.refit {
                let mut next = state.solution.clone();
                next.levels = self.refit(&lanes, &state.solution);
                next.values = self.values(&next.codes, &next.levels);
                self.take(&lanes, &mut state, next);
                refitted = state.loss;
                // New scales can make a better start than the place where the old codes are stuck.
                let mut next = self.sweep(&lanes, state.solution.levels.clone());
                let gradient = self.gradient(&lanes, &next.values).0;
                moves += self.descend(&mut next, gradient, self.settings.sweeps);
                self.take(&lanes, &mut state, next);
            }
            if rounds == 0 {
                (stages[1], stages[2]) = (descended, refitted);
            }
            for r in 0..LANES {
                // Written so that a loss of zero, or of less by rounding error, is done.
                state.done[r] |= !(state.loss[r] < before[r] * (1.0 - SETTLED));
            }
            rounds += 1;
        }
        stages[3] = state.loss;
        Ok(Solved { solution: state.solution, course: Course { stages, moves, rounds } })
    }

    /// Takes a row's new solution over where it is better and the row is not done.
    fn take(&self, w: &[Lane], state: &mut State, next: Solution) {
        let (gradient, new) = self.gradient(w, &next.values);
        for r in 0..LANES {
            if state.done[r] || !(new[r] < state.loss[r]) {
                continue;
            }
            state.loss[r] = new[r];
            for j in 0..self.dim {
                state.solution.codes[j][r] = next.codes[j][r];
                state.solution.values[j][r] = next.values[j][r];
                state.gradient[j][r] = gradient[j][r];
            }
            for (to, from) in state.solution.levels.iter_mut().zip(&next.levels) {
                to[r] = from[r];
            }
        }
    }
}
