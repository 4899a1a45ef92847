// Package lint holds no code: its test walks the import graph and the sources, and fails where a
// rule of the layout is broken. The rules stand in the test, each with its reason.
package lint
