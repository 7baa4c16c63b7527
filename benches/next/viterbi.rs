//! Viterbi search of one column of a weight on a bitshift trellis, with the rows coupled: `benches/next/trellis.py`.
//!
//! Built by `rustc` as a shared library and called by ctypes: an experiment, no part of the product.

/// Rows at both sides of the seam that decide the bits shared by the two ends of a column.
const SEAM: usize = 16;
/// Errors of a survivor that are told apart from those of the others; survivors have one past before that.
const WINDOW: usize = 16;

/// A column: codes are windows of `memory` bits of a cyclic stream, moved on by `bits` for each row.
struct Column<'a> {
    bits: usize,
    memory: usize,
    /// Value of each state, `[b][p]` for state `p << bits | b`, so that a loop over `p` is contiguous.
    values: &'a [f32],
    target: &'a [f32],
    scale: &'a [f32],
    /// `A = R^T diag(pivot) R`, `R` unit lower triangular, row-major.
    pivot: &'a [f32],
    coupling: &'a [f32],
}

/// Survivors of all states.
struct Survivors {
    cost: Vec<f32>,
    wanted: Vec<f32>,
    next: Vec<f32>,
    errors: Vec<[f32; WINDOW]>,
    moved: Vec<[f32; WINDOW]>,
    /// Top bits of the state before, by row and `[b][p]`.
    from: Vec<u32>,
}

impl Survivors {
    fn new(states: usize, rows: usize) -> Self {
        Self {
            cost: vec![0.0; states],
            wanted: vec![0.0; states],
            next: vec![0.0; states],
            errors: vec![[0.0; WINDOW]; states],
            moved: vec![[0.0; WINDOW]; states],
            from: vec![0; states * rows],
        }
    }

    /// The cheapest state of those that end in the same `low` states.
    fn best(&self, low: usize, end: Option<usize>) -> usize {
        let least = |from: &mut dyn Iterator<Item = usize>| {
            from.min_by(|&a, &b| self.cost[a].total_cmp(&self.cost[b])).unwrap_or(0)
        };
        match end {
            None => {
                let least = self.cost.iter().fold(f32::INFINITY, |a, &b| if b < a { b } else { a });
                self.cost.iter().position(|&c| c == least).unwrap_or(0)
            }
            Some(end) => least(&mut (end..self.cost.len()).step_by(low)),
        }
    }
}

impl Column<'_> {
    fn states(&self) -> usize {
        1 << self.memory
    }

    /// States per top digit: how many values the low `memory - bits` bits have.
    fn low(&self) -> usize {
        1 << (self.memory - self.bits)
    }

    /// Runs over `rows` (their numbers may wrap around); row `i` is coupled to the rows from `first` on, in order.
    fn run(&self, s: &mut Survivors, rows: &[usize], coupled_from: usize) {
        let m = self.target.len();
        let mut decided = vec![0.0f32; rows.len()];
        for (at, &row) in rows.iter().enumerate() {
            let mut coefficient = [0.0f32; WINDOW];
            let mut common = 0.0;
            for h in coupled_from..at {
                let r = self.coupling[row * m + rows[h]];
                if at - h <= WINDOW {
                    coefficient[h % WINDOW] = r;
                } else {
                    common += r * decided[h];
                }
            }
            let wanted = self.target[row] - common;
            if at > coupled_from {
                for (to, errors) in s.wanted.iter_mut().zip(&s.errors) {
                    *to = wanted - dot(errors, &coefficient);
                }
            } else {
                s.wanted.fill(wanted);
            }
            self.advance(s, at, row);
            if at + 1 >= WINDOW {
                // The slot that the next row takes over: its error is what the best survivor has there.
                let old = at + 1 - WINDOW;
                decided[old] = s.errors[s.best(0, None)][old % WINDOW];
            }
        }
    }

    /// One row: the best way into every state.
    fn advance(&self, s: &mut Survivors, at: usize, row: usize) {
        let (low, digits) = (self.low(), 1 << self.bits);
        let (scale, weight) = (self.scale[row], self.pivot[row]);
        let from = &mut s.from[at * self.states()..(at + 1) * self.states()];
        for b in 0..digits {
            let values = &self.values[b * low..(b + 1) * low];
            let best = &mut s.next[b * low..(b + 1) * low];
            let from = &mut from[b * low..(b + 1) * low];
            best.fill(f32::INFINITY);
            for x in 0..digits {
                let (cost, wanted) = (&s.cost[x * low..][..low], &s.wanted[x * low..][..low]);
                for p in 0..low {
                    let d = scale * values[p] - wanted[p];
                    let c = cost[p] + weight * d * d;
                    let better = c < best[p];
                    best[p] = if better { c } else { best[p] };
                    from[p] = if better { x as u32 } else { from[p] };
                }
            }
        }
        let target = self.target[row];
        for b in 0..digits {
            for p in 0..low {
                let to = p << self.bits | b;
                let before = from[b * low + p] as usize * low + p;
                s.cost[to] = s.next[b * low + p];
                s.moved[to] = s.errors[before];
                s.moved[to][at % WINDOW] = scale * self.values[b * low + p] - target;
            }
        }
        std::mem::swap(&mut s.errors, &mut s.moved);
    }

    /// The state before the one at row `at`.
    fn before(&self, s: &Survivors, at: usize, state: usize) -> usize {
        let (low, b, p) = (self.low(), state & ((1 << self.bits) - 1), state >> self.bits);
        s.from[at * self.states() + b * low + p] as usize * low + p
    }

    /// Bits that both ends share: those of a run through the seam.
    fn seam(&self, s: &mut Survivors) -> usize {
        let m = self.target.len();
        let width = SEAM.min(m / 2);
        let rows: Vec<usize> = (m - width..m).chain(0..width).collect();
        s.cost.fill(0.0);
        self.run(s, &rows, width);
        let mut state = s.best(0, None);
        for at in (width..2 * width).rev() {
            state = self.before(s, at, state);
        }
        state % self.low()
    }

    fn solve(&self, out: &mut [u32]) {
        let rows: Vec<usize> = (0..self.target.len()).collect();
        let mut s = Survivors::new(self.states(), rows.len().max(2 * SEAM));
        let shared = self.seam(&mut s);
        s.cost.fill(f32::INFINITY);
        s.cost[shared] = 0.0;
        self.run(&mut s, &rows, 0);
        let low = self.low();
        let mut state = s.best(low, Some(shared));
        for at in rows.into_iter().rev() {
            out[at] = state as u32;
            state = self.before(&s, at, state);
        }
    }
}

/// Eight sums side by side and then in pairs, so that it is a few instructions.
fn dot(a: &[f32; WINDOW], b: &[f32; WINDOW]) -> f32 {
    let mut sums = [0.0f32; 8];
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    let four: [f32; 4] = std::array::from_fn(|i| sums[i] + sums[i + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}

/// Writes the states of a column's rows to `out`.
///
/// # Safety
/// `values` has `2^memory` entries, `coupling` `rows * rows`, the others `rows`.
#[no_mangle]
pub unsafe extern "C" fn column(
    rows: usize,
    bits: usize,
    memory: usize,
    values: *const f32,
    target: *const f32,
    scale: *const f32,
    pivot: *const f32,
    coupling: *const f32,
    out: *mut u32,
) {
    let slice = |from: *const f32, n: usize| unsafe { std::slice::from_raw_parts(from, n) };
    let column = Column {
        bits,
        memory,
        values: slice(values, 1 << memory),
        target: slice(target, rows),
        scale: slice(scale, rows),
        pivot: slice(pivot, rows),
        coupling: slice(coupling, rows * rows),
    };
    column.solve(unsafe { std::slice::from_raw_parts_mut(out, rows) });
}
