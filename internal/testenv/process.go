package testenv

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
)

// process is a server that the rig runs beside the test.
type process struct {
	cmd  *exec.Cmd
	log  string // path of its output
	done chan struct{}
}

// start runs a server whose output goes to dir/name.log. The kernel kills it
// when the test ends without having stopped it: the parent-death signal goes by
// the thread that forked, so one thread stays for as long as the server runs.
func start(t T, dir, name string, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{cmd: cmd, log: filepath.Join(dir, name+".log"), done: make(chan struct{})}
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatalf("starting %s: %v", name, err)
	}
	cmd.Stdout, cmd.Stderr = out, out
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(p.done)
		defer out.Close()
		err := cmd.Start()
		started <- err
		if err == nil {
			cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		t.Fatalf("starting %s: %v", name, err)
	}
	cleanup(t, p.kill)
	return p
}

// kill ends the server at once.
func (p *process) kill() {
	p.cmd.Process.Kill()
	<-p.done
}

// alive returns an error with the end of the log when the server has ended.
func (p *process) alive() error {
	select {
	case <-p.done:
		b, _ := os.ReadFile(p.log)
		return fmt.Errorf("%s has ended; its log ends:\n%s", filepath.Base(p.cmd.Path), bytes.TrimSpace(b[max(0, len(b)-2000):]))
	default:
		return nil
	}
}
