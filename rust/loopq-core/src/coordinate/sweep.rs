//! The start: static scales of least weighted error, and one greedy sweep over the columns.

use crate::coordinate::{Problem, Solution};
use crate::grid::{fit, Level};
use crate::lanes::{add_product, Lane, LANES};
use crate::Result;

impl Problem<'_> {
    /// Fits the scales of a tile whose first row is row `first` of the weight.
    pub(super) fn fit(&self, w: &[Lane], first: usize) -> Result<Vec<[Level; LANES]>> {
        let group = self.grid.group(self.dim);
        let groups = w.chunks(group).zip(self.weights.chunks(group)).enumerate();
        groups
            .map(|(g, (columns, weights))| {
                let found = fit(self.isa, &self.grid, columns.as_flattened(), LANES, weights)
                    .map_err(|(lane, e)| e.located(first + lane, g))?;
                Ok(std::array::from_fn(|r| found[r]))
            })
            .collect()
    }

    /// Rounds the columns in their order, each error spread over the columns still to come.
    pub(super) fn sweep(&self, w: &[Lane], levels: Vec<[Level; LANES]>) -> Solution {
        let (dim, order) = (self.dim, self.factor.order());
        let mut updated: Vec<Lane> = order.iter().map(|&j| w[j]).collect();
        let mut found = Solution { codes: vec![[0; LANES]; dim], values: vec![[0.0; LANES]; dim], levels };
        for (i, &j) in order.iter().enumerate() {
            let level = &found.levels[self.group_of(j)];
            let mut error = [0.0; LANES];
            for r in 0..LANES {
                let code = level[r].code(updated[i][r], self.grid.top());
                found.codes[j][r] = code;
                found.values[j][r] = f64::from(level[r].value(code));
                error[r] = w[j][r] - found.values[j][r];
            }
            for (from, piece) in self.factor.later(i) {
                add_product(self.isa, &mut updated[from..], piece, &error);
            }
        }
        found
    }
}
