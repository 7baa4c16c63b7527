//! The one door: leaves the interpreter, watches for Ctrl-C, turns errors into exceptions.

use std::sync::mpsc::{sync_channel, RecvTimeoutError};
use std::time::Duration;

use loopq_core::error::Kind;
use loopq_core::{Error, Watch};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

/// How often signals and progress are looked at.
const TICK: Duration = Duration::from_millis(100);

/// The exception of `loopq.errors` that a core error becomes.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let class = match error.kind() {
        Kind::Config => "ConfigError",
        Kind::NonFinite => "NonFiniteError",
        Kind::Dump => "DumpError",
        Kind::Solve => "SolveError",
        Kind::Interrupted => return PyKeyboardInterrupt::new_err("interrupted"),
    };
    let made =
        py.import("loopq.errors").and_then(|m| m.getattr(class)).and_then(|c| c.call1((error.to_string(),)));
    match made {
        Ok(value) => PyErr::from_value(value),
        Err(failed) => failed,
    }
}

/// Runs `work` without the interpreter on a thread of its own. This thread looks for signals and reports progress.
pub(crate) fn run<T: Send>(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&Watch) -> Result<T, Error> + Send,
) -> PyResult<T> {
    let watch = Watch::new();
    let progress = progress.map(|p| p.clone().unbind());
    let (outcome, raised) = py.detach(|| {
        std::thread::scope(|scope| {
            let (sender, receiver) = sync_channel(1);
            let watch = &watch;
            scope.spawn(move || {
                // The receiver waits until it has got this, so sending cannot fail.
                let _ = sender.send(work(watch));
            });
            let mut raised: Option<PyErr> = None;
            loop {
                match receiver.recv_timeout(TICK) {
                    Ok(result) => return (Some(result), raised),
                    Err(RecvTimeoutError::Disconnected) => return (None, raised),
                    Err(RecvTimeoutError::Timeout) if raised.is_none() => {
                        raised = Python::attach(|py| look(py, watch, progress.as_ref())).err();
                        if raised.is_some() {
                            watch.cancel();
                        }
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                }
            }
        })
    });
    if let Some(raised) = raised {
        return Err(raised);
    }
    match outcome {
        Some(result) => result.map_err(|e| raise(py, &e)),
        // Only a panic in the core gets here; std has printed it.
        None => Err(pyo3::panic::PanicException::new_err("the core panicked; please report this")),
    }
}

fn look(py: Python<'_>, watch: &Watch, progress: Option<&Py<PyAny>>) -> PyResult<()> {
    py.check_signals()?;
    if let Some(progress) = progress {
        progress.call1(py, (watch.fraction(),))?;
    }
    Ok(())
}
