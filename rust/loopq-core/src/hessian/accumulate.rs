//! The accumulator: rows in, exact Hessians out.

use std::path::Path;

use rayon::prelude::*;

use crate::dump::{rows_of_file, MappedFile, RowType, Rows};
use crate::hessian::matrix::ExactMatrix;
use crate::hessian::rows::{check, PackedBlock};
use crate::hessian::{limbs, BLOCK_ROWS, SUM_LIMIT};
use crate::pages::Pages;
use crate::pool::pool;
use crate::simd::Isa;
use crate::{dims, Error, Result, Watch};

/// Bytes that rows waiting in all steps together may take before they are worked off.
const WAITING_BYTES: usize = 256 << 20;
/// Bytes of packed rows worked off in one pass.
const PASS_BYTES: usize = 192 << 20;
/// Blocks that one pass is cut to at most.
const PASS_BLOCKS: usize = 16;

/// What an accumulator is made for.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Columns of a row.
    pub dim: usize,
    /// The loop steps that will come; each once, ascending.
    pub steps: Vec<usize>,
    /// One Hessian per step, or only their sum.
    pub per_step: bool,
    /// Threads; 0 for all.
    pub threads: usize,
    /// Instruction set.
    pub isa: Isa,
}

impl Settings {
    /// Refuses a width of zero and steps that are not ascending.
    pub(super) fn check(&self) -> Result<()> {
        if self.dim == 0 {
            return Err(Error::setting("dim", 0, "1 or more"));
        }
        if self.steps.is_empty() || self.steps.windows(2).any(|w| w[0] >= w[1]) {
            let got = format!("{:?}", self.steps);
            return Err(Error::setting("steps", got, "one or more, ascending, each once"));
        }
        Ok(())
    }
}

/// Rows of one step that wait for their block to fill.
#[derive(Clone, Debug, Default)]
struct Waiting {
    bytes: Vec<u8>,
    n_rows: u64,
    /// An upper bound on what the step's worked-off rows have added to any entry.
    bound: f64,
    /// The same for the rows in `bytes`, which no sum holds yet.
    bound_waiting: f64,
}

impl Waiting {
    /// Counts rows of at most `top` in magnitude that the sums now hold.
    fn worked_off(&mut self, n_rows: usize, top: f64) {
        self.bound += n_rows as f64 * top * top;
    }

    /// Keeps rows of at most `top` in magnitude for later.
    fn keep(&mut self, rows: Rows<'_>, top: f64) {
        self.bytes.extend_from_slice(rows.bytes());
        self.bound_waiting += rows.n_rows() as f64 * top * top;
    }
}

/// Streaming `X^T X` per step.
#[derive(Clone, Debug)]
pub struct Accumulator {
    pub(super) settings: Settings,
    pub(super) matrices: Vec<ExactMatrix>,
    waiting: Vec<Waiting>,
    dtype: Option<RowType>,
    finished: bool,
    /// Set while rows are worked off: still set later if that was interrupted, and then the sums are not whole.
    broken: bool,
}

impl Accumulator {
    /// An empty accumulator.
    pub fn new(settings: Settings) -> Result<Self> {
        settings.check()?;
        let n_matrices = if settings.per_step { settings.steps.len() } else { 1 };
        let zeros = || (0..n_matrices).map(|_| ExactMatrix::zeros(settings.dim)).collect::<Result<_>>();
        let matrices = pool(settings.threads)?.install(zeros)?;
        let waiting = vec![Waiting::default(); settings.steps.len()];
        Ok(Self { settings, matrices, waiting, dtype: None, finished: false, broken: false })
    }

    /// The settings it was made with.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether [`Accumulator::finish`] was called.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// Rows seen in a step.
    pub fn n_rows(&self, step: usize) -> Result<u64> {
        Ok(self.waiting[self.index_of(step)?].n_rows)
    }

    /// Bytes that the exact sums and the waiting rows take.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        let sums: usize = self.matrices.iter().map(ExactMatrix::n_bytes).sum();
        sums + self.waiting.iter().map(|w| w.bytes.capacity()).sum::<usize>()
    }

    pub(super) fn index_of(&self, step: usize) -> Result<usize> {
        let steps = &self.settings.steps;
        steps.binary_search(&step).map_err(|_| Error::UnknownStep { step, steps: steps.clone() })
    }

    /// Adds rows to a step. A refused call changes nothing.
    pub fn update(&mut self, step: usize, rows: Rows<'_>, watch: &Watch) -> Result<()> {
        let at = self.index_of(step)?;
        let top = self.admit(at, rows)?;
        watch.plan(self.work(rows.n_rows()));
        self.take(at, rows, top, watch)
    }

    /// Adds rows of a file, `offset` bytes into it.
    pub fn update_file(
        &mut self,
        step: usize,
        path: &Path,
        offset: u64,
        n_rows: usize,
        dtype: RowType,
        watch: &Watch,
    ) -> Result<()> {
        let file = MappedFile::open(path)?;
        self.update(step, rows_of_file(&file, path, offset, n_rows, self.settings.dim, dtype)?, watch)
    }

    /// Adds `X^T X` of rows whose products were summed elsewhere, on a GPU say. A refused call changes nothing.
    ///
    /// `products` is row-major, `dim` x `dim`; its upper triangle is read. Each entry is put on the grid, so that
    /// sums of such parts are exact again. The float32 blocks of [`Accumulator::update`] are not reproduced.
    ///
    /// `n_rows` says how many rows of which step the products sum over: one step where steps are kept apart.
    pub fn add_products(&mut self, n_rows: &[(usize, u64)], products: &[f64]) -> Result<()> {
        self.check_whole()?;
        let dim = self.settings.dim;
        let at: Vec<usize> = n_rows.iter().map(|&(step, _)| self.index_of(step)).collect::<Result<_>>()?;
        if at.is_empty() || (self.settings.per_step && at.len() > 1) {
            return Err(Error::setting("n_rows", format!("{n_rows:?}"), "one step, or the steps of a sum"));
        }
        if self.finished {
            return Err(Error::Finished);
        }
        if products.len() != dims::product("the products", dim, dim)? {
            return Err(Error::shape("products", dim * dim, products.len()));
        }
        if let Some(bad) = products.iter().position(|v| !v.is_finite()) {
            let (row, column) = (bad / dim, bad % dim);
            let value = crate::error::name_of(products[bad]);
            return Err(Error::NonFiniteMatrix { what: "the products", row, column, value });
        }
        let top = products.iter().fold(0.0, |top: f64, v| top.max(v.abs()));
        self.reserve(top, at[0])?;
        self.waiting[at[0]].bound += top;
        for (&at, &(_, count)) in at.iter().zip(n_rows) {
            self.waiting[at].n_rows += count;
        }
        self.matrices[if self.settings.per_step { at[0] } else { 0 }].for_each_mut(|i, j, hi, lo| {
            let (add_hi, add_lo) = limbs::split(products[i * dim + j]);
            limbs::add_one(hi, lo, add_hi, add_lo);
        });
        Ok(())
    }

    /// Refuses what cannot be added, before anything is changed; returns the rows' largest magnitude.
    fn admit(&mut self, at: usize, rows: Rows<'_>) -> Result<f64> {
        self.check_whole()?;
        if self.finished {
            return Err(Error::Finished);
        }
        if rows.dim() != self.settings.dim {
            return Err(Error::shape("columns of the rows", self.settings.dim, rows.dim()));
        }
        if let Some(first) = self.dtype.filter(|&first| first != rows.dtype()) {
            return Err(Error::RowType { first: first.name(), got: rows.dtype().name() });
        }
        let step = self.settings.steps[at];
        let top = self.check_parallel(rows, step, self.waiting[at].n_rows)?;
        self.reserve(rows.n_rows() as f64 * top * top, at)?;
        self.dtype = Some(rows.dtype());
        Ok(top)
    }

    /// Refuses what could make any entry leave the grid by growing by `grown`.
    fn reserve(&mut self, grown: f64, at: usize) -> Result<()> {
        if self.bound() + grown > SUM_LIMIT {
            self.tighten();
            if self.bound() + grown > SUM_LIMIT {
                let (step, rows) = (self.settings.steps[at], self.waiting[at].n_rows);
                return Err(Error::SumTooLarge { step, rows, limit: SUM_LIMIT });
            }
        }
        Ok(())
    }

    fn check_parallel(&self, rows: Rows<'_>, step: usize, first: u64) -> Result<f64> {
        let (chunks, isa) = (rows.n_rows().div_ceil(BLOCK_ROWS), self.settings.isa);
        let tops: Vec<Result<f64>> = pool(self.settings.threads)?.install(|| {
            (0..chunks)
                .into_par_iter()
                .map(|c| {
                    let from = c * BLOCK_ROWS;
                    let n = BLOCK_ROWS.min(rows.n_rows() - from);
                    check(rows.slice(from, n), isa, step, first + from as u64)
                })
                .collect()
        });
        tops.into_iter().try_fold(0.0, |top: f64, next| Ok(top.max(next?)))
    }

    /// Bound on every entry of every sum, also of the sum over steps.
    fn bound(&self) -> f64 {
        self.waiting.iter().map(|w| w.bound + w.bound_waiting).sum()
    }

    /// Replaces the bounds of rows that were worked off by the largest entry that the sums really hold.
    fn tighten(&mut self) {
        let per_step = self.settings.per_step;
        for (i, waiting) in self.waiting.iter_mut().enumerate() {
            let matrix =
                if per_step { self.matrices.get(i) } else { self.matrices.first().filter(|_| i == 0) };
            waiting.bound = matrix.map_or(0.0, ExactMatrix::top);
        }
    }

    fn work(&self, n_rows: usize) -> u64 {
        (n_rows as u64).saturating_mul((self.settings.dim * (self.settings.dim + 1) / 2) as u64)
    }

    /// Rows that may wait in one step: whole blocks.
    fn waiting_rows(&self, row_bytes: usize) -> usize {
        let each = WAITING_BYTES / self.settings.steps.len() / row_bytes / BLOCK_ROWS;
        each.clamp(1, PASS_BLOCKS) * BLOCK_ROWS
    }

    fn take(&mut self, at: usize, mut rows: Rows<'_>, top: f64, watch: &Watch) -> Result<()> {
        let limit = self.waiting_rows(rows.row_bytes());
        self.waiting[at].n_rows += rows.n_rows() as u64;
        while rows.n_rows() > 0 {
            let held = self.waiting[at].bytes.len() / rows.row_bytes();
            if held == 0 && rows.n_rows() >= limit {
                let whole = rows.n_rows() / BLOCK_ROWS * BLOCK_ROWS;
                self.work_off(at, rows.slice(0, whole), watch)?;
                self.waiting[at].worked_off(whole, top);
                rows = rows.slice(whole, rows.n_rows() - whole);
                continue;
            }
            let n = rows.n_rows().min(limit - held);
            self.waiting[at].keep(rows.slice(0, n), top);
            rows = rows.slice(n, rows.n_rows() - n);
            if held + n == limit {
                self.flush(at, watch)?;
            }
        }
        Ok(())
    }

    /// Works off everything that waits in a step.
    fn flush(&mut self, at: usize, watch: &Watch) -> Result<()> {
        let Some(dtype) = self.dtype else {
            return Ok(());
        };
        let mut bytes = std::mem::take(&mut self.waiting[at].bytes);
        let n = bytes.len() / (dtype.size() * self.settings.dim);
        let result =
            Rows::new(&bytes, dtype, n, self.settings.dim).and_then(|rows| self.work_off(at, rows, watch));
        bytes.clear();
        let waiting = &mut self.waiting[at];
        waiting.bytes = bytes;
        waiting.bound += std::mem::take(&mut waiting.bound_waiting);
        result
    }

    fn work_off(&mut self, at: usize, rows: Rows<'_>, watch: &Watch) -> Result<()> {
        let Settings { dim, per_step, threads, isa, .. } = self.settings;
        let pairs = isa.has_pairs() && rows.dtype() == RowType::Bf16;
        let words = PackedBlock::n_words(dim, pairs);
        let pass = (PASS_BYTES / dims::product("a block of rows", words, 4)?).clamp(1, PASS_BLOCKS);
        let blocks = pass.min(rows.n_rows().div_ceil(BLOCK_ROWS));
        // Kept from pass to pass, but not between calls: a model has hundreds of accumulators.
        let mut packed = Pages::<u32>::room(blocks * words);
        let matrix = &mut self.matrices[if per_step { at } else { 0 }];
        self.broken = true;
        let mut from = 0;
        while from < rows.n_rows() {
            let n = (pass * BLOCK_ROWS).min(rows.n_rows() - from);
            let blocks: Vec<PackedBlock<'_>> = pool(threads)?.install(|| {
                packed
                    .par_chunks_mut(words)
                    .take(n.div_ceil(BLOCK_ROWS))
                    .enumerate()
                    .map(|(b, room)| {
                        let start = b * BLOCK_ROWS;
                        let rows = rows.slice(from + start, BLOCK_ROWS.min(n - start));
                        PackedBlock::pack(rows, pairs, isa, room)
                    })
                    .collect()
            });
            matrix.add_blocks(&blocks, isa, threads, watch)?;
            watch.advance((n as u64).saturating_mul((dim * (dim + 1) / 2) as u64))?;
            from += n;
        }
        self.broken = false;
        Ok(())
    }

    /// Works off all partial blocks. Further calls do nothing.
    pub fn finish(&mut self, watch: &Watch) -> Result<()> {
        self.check_whole()?;
        if self.finished {
            return Ok(());
        }
        for at in 0..self.waiting.len() {
            self.flush(at, watch)?;
            self.waiting[at].bytes = Vec::new();
        }
        self.finished = true;
        Ok(())
    }

    fn check_whole(&self) -> Result<()> {
        if self.broken {
            return Err(Error::Broken);
        }
        Ok(())
    }

    pub(super) fn check_finished(&self) -> Result<()> {
        self.check_whole()?;
        if self.finished {
            return Ok(());
        }
        Err(Error::NotFinished)
    }

    /// Which matrices make up the sum over `steps`, ascending.
    fn chosen(&self, steps: Option<&[usize]>) -> Result<Vec<usize>> {
        self.check_finished()?;
        let Some(steps) = steps else {
            return Ok((0..self.matrices.len()).collect());
        };
        let mut found = steps.iter().map(|&s| self.index_of(s)).collect::<Result<Vec<_>>>()?;
        found.sort_unstable();
        if found.is_empty() || found.windows(2).any(|w| w[0] == w[1]) {
            return Err(Error::setting("steps", format!("{steps:?}"), "one or more steps, each once"));
        }
        if self.settings.per_step {
            return Ok(found);
        }
        if found.len() == self.settings.steps.len() {
            return Ok(vec![0]);
        }
        Err(Error::OnlySummed { got: steps.to_vec(), steps: self.settings.steps.clone() })
    }

    /// The full symmetric sum over steps, row-major: the exact sum rounded once to double precision.
    pub fn matrix(&self, steps: Option<&[usize]>) -> Result<Vec<f64>> {
        let chosen = self.chosen(steps)?;
        let dim = self.settings.dim;
        let mut out = vec![0.0; dims::product("the Hessian", dim, dim)?];
        if let [only] = chosen[..] {
            self.matrices[only]
                .for_each(|i, j, hi, lo| out[i * dim + j] = limbs::to_f64(limbs::integer(hi, lo)));
        } else {
            let mut sum = ExactMatrix::zeros(dim)?;
            for &m in &chosen {
                sum.merge(&self.matrices[m]);
            }
            sum.for_each(|i, j, hi, lo| out[i * dim + j] = limbs::to_f64(limbs::integer(hi, lo)));
        }
        mirror(&mut out, dim);
        Ok(out)
    }

    /// `sum_t weights[t] * H_t` in double precision, each `H_t` rounded once, folded in ascending order of steps.
    pub fn weighted(&self, steps: Option<&[usize]>, weights: &[f64]) -> Result<Vec<f64>> {
        let chosen = self.chosen(steps)?;
        if !self.settings.per_step && self.settings.steps.len() > 1 {
            return Err(Error::OnlySummed {
                got: steps.map_or_else(|| self.settings.steps.clone(), <[usize]>::to_vec),
                steps: self.settings.steps.clone(),
            });
        }
        let order = steps.map_or_else(|| self.settings.steps.clone(), <[usize]>::to_vec);
        if weights.len() != order.len() {
            return Err(Error::shape("weights", format!("{} (one per step)", order.len()), weights.len()));
        }
        if let Some(bad) = weights.iter().find(|w| !w.is_finite() || **w < 0.0) {
            return Err(Error::setting("weights", bad, "finite numbers of 0 or more"));
        }
        let dim = self.settings.dim;
        let mut out = vec![0.0; dims::product("the Hessian", dim, dim)?];
        for m in chosen {
            let weight = order.iter().position(|&s| s == self.settings.steps[m]).map_or(0.0, |p| weights[p]);
            self.matrices[m].for_each(|i, j, hi, lo| {
                let entry = &mut out[i * dim + j];
                *entry += weight * limbs::to_f64(limbs::integer(hi, lo));
            });
        }
        mirror(&mut out, dim);
        Ok(out)
    }

    /// The diagonal of the sum over steps.
    pub fn diagonal(&self, steps: Option<&[usize]>) -> Result<Vec<f64>> {
        let mut out = vec![0.0; self.settings.dim];
        for m in self.chosen(steps)? {
            for (sum, entry) in out.iter_mut().zip(self.matrices[m].diagonal()) {
                *sum += entry;
            }
        }
        Ok(out)
    }

    /// The trace of one step's Hessian, or of the sum over all steps.
    pub fn trace(&self, step: Option<usize>) -> Result<f64> {
        Ok(self.diagonal(step.as_ref().map(std::slice::from_ref))?.iter().sum())
    }

    /// Adds another finished accumulator: any order, any grouping, the same bits.
    pub fn merge(&mut self, other: &Self) -> Result<()> {
        self.check_finished()?;
        other.check_finished()?;
        let (a, b) = (self.settings.clone(), &other.settings);
        let differ = |what, left: String, right: String| Err(Error::MergeMismatch { what, left, right });
        if a.dim != b.dim {
            return differ("dims", a.dim.to_string(), b.dim.to_string());
        }
        if a.steps != b.steps {
            return differ("steps", format!("{:?}", a.steps), format!("{:?}", b.steps));
        }
        if a.per_step != b.per_step {
            return differ("per_step", a.per_step.to_string(), b.per_step.to_string());
        }
        if self.bound() + other.bound() > SUM_LIMIT {
            self.tighten();
            let theirs: f64 = other.matrices.iter().map(ExactMatrix::top).sum();
            if self.bound() + theirs > SUM_LIMIT {
                return Err(Error::SumTooLarge {
                    step: a.steps[0],
                    rows: self.waiting[0].n_rows,
                    limit: SUM_LIMIT,
                });
            }
        }
        for (mine, theirs) in self.matrices.iter_mut().zip(&other.matrices) {
            mine.merge(theirs);
        }
        for (mine, theirs) in self.waiting.iter_mut().zip(&other.waiting) {
            mine.n_rows += theirs.n_rows;
            mine.bound += theirs.bound + theirs.bound_waiting;
        }
        Ok(())
    }

    /// Rebuilds a finished accumulator from its parts, which have been checked.
    pub(super) fn restore(settings: Settings, matrices: Vec<ExactMatrix>, n_rows: &[u64]) -> Self {
        let waiting = n_rows.iter().map(|&n_rows| Waiting { n_rows, ..Waiting::default() }).collect();
        let mut made = Self { settings, matrices, waiting, dtype: None, finished: true, broken: false };
        made.tighten();
        made
    }
}

/// Copies the upper triangle onto the lower.
fn mirror(matrix: &mut [f64], dim: usize) {
    for i in 1..dim {
        for j in 0..i {
            matrix[i * dim + j] = matrix[j * dim + i];
        }
    }
}
