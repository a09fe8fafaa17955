// Command demo shows the whole of kip on a real containerd: a gateway lists
// kernels, their images are in a registry with passwords, a pull secret is
// mounted, and the kubelet's own interface says what it sees in the end.
//
// With -keep all stays up for a look at it, and -stop ends that.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"example.com/kip/internal/testenv"
)

func main() {
	keep := flag.Bool("keep", false, "leave everything up")
	stop := flag.Bool("stop", false, "end what -keep left up")
	behind := flag.Bool("behind", false, "set by -keep for the process that stays")
	flag.Parse()
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "the demo needs root: it starts a containerd")
		os.Exit(1)
	}
	testenv.Run(func(t testenv.T) {
		switch {
		case *stop:
			stopKept(t)
		case *keep:
			stayBehind(t)
		default:
			demo(t, *behind)
		}
	})
}

// demo is the show. Where hold is set it ends only by a signal.
func demo(t testenv.T, hold bool) {
	step("preparing: containerd, registry, crictl, runc, kip")
	testenv.Prepare(t)
	dir := testenv.Dir(t)
	kip := testenv.Kip(t, dir, false)

	step("starting containerd, a registry with passwords and an Enterprise Gateway")
	node := testenv.StartContainerd(t, testenv.Config{})
	reg := testenv.StartRegistry(t, testenv.Bearer, map[string]testenv.User{"team": {Password: "s3cret", Prefixes: []string{"team/"}}})
	gateway := testenv.StartGateway(t, "gateway-token")
	m := testenv.NewImages(t)
	node.LoadPause(m, reg)
	kernels := m.Kernels(4)
	names := map[string]string{
		"python": reg.Push(m, kernels[0], "team/kernel-py:1"),
		"r":      reg.Push(m, kernels[1], "team/kernel-r:1"),
		"scala":  reg.Push(m, kernels[2], "team/kernel-scala:1"),
		"plain":  reg.Push(m, kernels[3], "public/kernel-plain:1"),
	}
	specs := map[string]json.RawMessage{"broken": json.RawMessage(`{"spec":{"metadata":{"process_proxy":"?"}}}`)}
	for name, image := range names {
		specs[name] = testenv.Kernelspec(name, image)
	}
	gateway.SetKernelspecs(specs)
	secrets := filepath.Join(dir, "secrets")
	testenv.MountSecret(t, secrets, "team-pull", map[string]testenv.Login{reg.Host: {Username: "team", Password: "s3cret"}})

	env := []string{
		"CONTAINERD_ADDRESS=" + node.Address, "KIP_SECRETS_DIR=" + secrets,
		"KIP_GATEWAY_HOST=" + gateway.URL, "KIP_AUTH_TOKEN=gateway-token",
	}
	step("kip run --once")
	run(t, 0, env, kip, "run", "--once")

	step("what the kubelet sees, by CRI's ListImages and ImageStatus")
	for _, img := range node.ListImages() {
		fmt.Printf("%s\n  tags    %s\n  digests %s\n", img.Id, img.RepoTags, img.RepoDigests)
	}
	for _, image := range names {
		if node.ImageStatus(image) == nil {
			t.Fatalf("the kubelet does not see %s", image)
		}
	}

	step("kip run --once again: nothing to do, no request to the registry")
	reg.Forget()
	run(t, 0, env, kip, "run", "--once")
	if n := len(reg.Requests()); n > 0 {
		t.Fatalf("the registry saw %d requests", n)
	}

	step("a kernel starts with the registry stopped")
	if hold {
		fmt.Println("(left out: the registry stays up)")
	} else {
		reg.Stop()
	}
	fmt.Print(node.RunContainer(names["python"], "hello from k1"))

	step("what a wrong password looks like")
	wrongPassword(t, kip, env, names["plain"])

	if hold {
		printHowTo(t, node, reg, env, kip)
		awaitSignal(t)
	}
}

// wrongPassword shows it on a second registry, since the first one may be stopped.
func wrongPassword(t testenv.T, kip string, env []string, plain string) {
	reg := testenv.StartRegistry(t, testenv.Bearer, map[string]testenv.User{"team": {Password: "s3cret"}})
	m := testenv.NewImages(t)
	ref := reg.Push(m, m.Kernels(1)[0], "team/kernel-py:2")
	dir := filepath.Join(testenv.Dir(t), "secrets")
	testenv.MountSecret(t, dir, "team-pull", map[string]testenv.Login{reg.Host: {Username: "team", Password: "wrong"}})
	run(t, 1, append(env, "KIP_SECRETS_DIR="+dir), kip, "run", "--once", "--image-fetcher", "StaticListFetcher", "--images", ref+","+plain)
}

func step(text string) { fmt.Printf("\n== %s\n", text) }

// run runs kip and shows what it prints; it must end with the given status.
func run(t testenv.T, status int, env []string, name string, args ...string) {
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	err := cmd.Run()
	if got := cmd.ProcessState.ExitCode(); got != status {
		t.Fatalf("kip ended with status %d (%v), expected %d", got, err, status)
	}
	fmt.Printf("exit status %d\n", status)
}

func printHowTo(t testenv.T, node *testenv.Containerd, reg *testenv.Registry, env []string, kip string) {
	step("everything stays up until make demo-stop")
	fmt.Println("registry " + reg.Host + ", user team, password s3cret; point the programs at the node by:")
	fmt.Println()
	for _, e := range env {
		fmt.Println("  export " + e)
	}
	fmt.Printf("\n  %s run --once\n  %s pull %s/team/kernel-py:1\n", kip, kip, reg.Host)
	fmt.Printf("  %s -n k8s.io images ls\n", testenv.Tool(t, "ctr"))
	fmt.Printf("  %s -r unix://%s images\n", testenv.Tool(t, "crictl"), node.Address)
}

func keptProgram(t testenv.T) string { return filepath.Join(testenv.Tree(t), ".cache", "demo") }

// pidFile names the process that stays behind, with all that it started.
func pidFile(t testenv.T) string { return filepath.Join(testenv.Tree(t), ".cache", "demo.pid") }

// stayBehind runs the demo in a process of its own session, shows its output
// until it has no more to say, and leaves it up.
func stayBehind(t testenv.T) {
	stopKept(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatalf("finding the demo's own program: %v", err)
	}
	// go run removes its binary when this process ends.
	if err := copyFile(exe, keptProgram(t)); err != nil {
		t.Fatalf("keeping the demo's program: %v", err)
	}
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatalf("starting the demo: %v", err)
	}
	cmd := exec.Command(keptProgram(t), "-behind")
	cmd.Stdout, cmd.Stderr = in, in
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		t.Fatalf("starting the demo: %v", err)
	}
	in.Close()
	if err := os.WriteFile(pidFile(t), []byte(strconv.Itoa(cmd.Process.Pid)), 0o644); err != nil {
		t.Fatalf("noting the demo's process: %v", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	io.Copy(os.Stdout, out)
	select {
	case err := <-ended:
		t.Fatalf("the demo has ended: %v", err)
	case <-time.After(time.Second): // a process that ends closes its output a moment before
	}
}

// awaitSignal lets go of the output, which is the sign for stayBehind, and waits
// for the signal that makes the rig clean up and end the process.
func awaitSignal(t testenv.T) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	for _, fd := range []int{1, 2} {
		if err == nil {
			err = syscall.Dup3(int(null.Fd()), fd, 0)
		}
	}
	if err != nil {
		t.Fatalf("letting go of the output: %v", err)
	}
	select {}
}

// kept tells whether a process is the demo that stayed behind: its number may
// have gone to another one.
func kept(t testenv.T, pid int) bool {
	exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	return strings.TrimSuffix(exe, " (deleted)") == keptProgram(t)
}

// stopKept ends the process that stayed behind and waits until it is gone.
func stopKept(t testenv.T) {
	b, err := os.ReadFile(pidFile(t))
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	pid, err := strconv.Atoi(string(bytes.TrimSpace(b)))
	if err != nil {
		t.Fatalf("reading %s: %v", pidFile(t), err)
	}
	for range 300 {
		if !kept(t, pid) {
			os.Remove(pidFile(t))
			return
		}
		syscall.Kill(pid, syscall.SIGTERM)
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatalf("process %d does not end", pid)
}

func copyFile(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	os.Remove(to) // it may be running
	return os.WriteFile(to, b, 0o755)
}
